"""Reports: what came of a run or of a comparison, as one HTML file that needs nothing beside it.

The first screen answers: did they teach each other, and did anyone get hurt?
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["write_comparison_report", "write_report"]

LIBRARIES = ("jinja2", "matplotlib")

RUN_FILES = ("config.json", "manifest.json", "metrics.jsonl", "evals.jsonl")
"""By any of these a directory is known as a run's."""


def write_report(run_dir: Path, control_dir: Path | None = None) -> Path:
    """Write RUN/report.html from whatever the run has left behind, and return its path.

    Args: control_dir: the isolated run of the same seed; None looks for it beside a run of a comparison
    (`sgt-seed0` -> `isolated-seed0`). A directory that holds a comparison gets the comparison's report.
    Raises: RunDirError when the directory holds neither a run nor a comparison; ReportError without jinja2 or matplotlib.
    """
    from mutualrl.errors import RunDirError

    _require_libraries()
    from mutualrl.report.comparison import COMPARISON_FILE
    from mutualrl.report.run import find_control, write_run_report

    if (run_dir / COMPARISON_FILE).exists():
        return write_comparison_report(run_dir)
    if not any((run_dir / name).exists() for name in RUN_FILES):
        raise RunDirError(f"no run or comparison in {run_dir}: give a directory that `mutualrl up` or `compare` wrote")
    return write_run_report(run_dir, control_dir or find_control(run_dir))


def write_comparison_report(output_dir: Path) -> Path:
    """Write OUT/report.html over all runs that OUT/compare.json names, and return its path; errors as in `write_report`."""
    _require_libraries()
    from mutualrl.report.comparison_page import write_comparison_page

    return write_comparison_page(output_dir)


def _require_libraries() -> None:
    from mutualrl.errors import ReportError

    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(f"a report needs {' and '.join(missing)}: pip install 'mutualrl[train]'")
