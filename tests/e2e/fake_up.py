"""`mutualrl up CONFIG --output-dir DIR [KEY=VALUE …]` with the light agents of fake_roles.py."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from mutualrl import up
from mutualrl.output import unbreakable_output
from mutualrl.rundir import RunDir
from mutualrl.supervise import HUB


def command(run_dir: RunDir, role: str) -> list[str]:
    """Python's arguments for a role of a run with light agents."""
    which = [HUB, str(run_dir.path)] if role == HUB else ["agent", str(run_dir.path), role]
    return [str(Path(__file__).with_name("fake_roles.py")), *which]


if __name__ == "__main__":
    config, output_dir, *overrides = sys.argv[1:]
    with unbreakable_output():
        sys.exit(up.run_up(Path(config), overrides, output_dir=Path(output_dir), command=command, console=Console(width=200)))
