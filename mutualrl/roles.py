"""Entry point of the processes of a run: `python -m mutualrl.roles hub RUN_DIR` and `… agent RUN_DIR NAME`.

A role runs one coroutine with a stop event. SIGTERM and SIGINT set the event (drain: finish the step, save, leave), and so
does the end of the supervisor; who takes too long is ended. Exit codes are those of mutualrl/exit_codes.py.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from mutualrl import exit_codes
from mutualrl.deathwatch import ORPHANED, arm, end_group
from mutualrl.errors import ConfigError

AgentMain = Callable[[Path, str, asyncio.Event], Awaitable[None]]
Body = Callable[[asyncio.Event], Awaitable[None]]


def main(argv: Sequence[str] | None = None, *, agent_main: AgentMain | None = None) -> NoReturn:
    """Run the role that the arguments name and end the process. agent_main: what an agent does, given to test runs."""
    parser = argparse.ArgumentParser(prog="mutualrl.roles", description="One process of a run; started by `mutualrl up`.")
    parser.add_argument("--death-fd", type=int, help="read end of the supervisor's death pipe")
    parser.add_argument("--supervisor-pid", type=int, help="leave at once when the parent is not this process")
    parser.add_argument("role", choices=("hub", "agent"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name", nargs="?", default="", help="which agent")
    arguments = parser.parse_args(argv)
    if arguments.death_fd is not None:
        last_act = (lambda: _leave_no_directory(arguments.run_dir)) if arguments.role == "hub" else None
        arm(death_fd=arguments.death_fd, supervisor_pid=arguments.supervisor_pid, last_act=last_act)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    code = _outcome(lambda: _body(arguments, agent_main))
    # Threads and message contexts that a library left open must not keep a finished role from ending.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == exit_codes.of_signal(ORPHANED):
        end_group()
    os._exit(code)


def _leave_no_directory(run_dir: Path) -> None:
    """Remove the directory of a hub whose supervisor is gone: nobody else knows of it."""
    from exchange.endpoints import remove_private_dir
    from mutualrl.rundir import RunDir

    remove_private_dir(RunDir(run_dir).read_manifest().endpoint)


def _body(arguments: argparse.Namespace, agent_main: AgentMain | None) -> Body:
    if arguments.role == "hub":
        from mutualrl.hub import hub_main

        return lambda stop: hub_main(arguments.run_dir, stop)
    if agent_main is None:
        from mutualrl.wiring import agent_main as real_agent_main

        agent_main = real_agent_main
    chosen = agent_main
    return lambda stop: chosen(arguments.run_dir, arguments.name, stop)


def _outcome(load: Callable[[], Body]) -> int:
    """Exit code of the role. Loading comes before the signal handlers, so that SIGTERM ends a loading role at once."""
    try:
        return asyncio.run(_run_until_stopped(load()))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.of_error(error)
    except BaseException as error:
        traceback.print_exc()
        return exit_codes.of_error(error)


async def _run_until_stopped(body: Body) -> int:
    stop = asyncio.Event()
    received: list[int] = []

    def drain(number: int) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, ORPHANED):
        asyncio.get_running_loop().add_signal_handler(number, drain, number)
    await body(stop)
    if not received:
        return exit_codes.DONE
    return exit_codes.of_signal(ORPHANED if ORPHANED in received else received[0])


if __name__ == "__main__":
    main()
