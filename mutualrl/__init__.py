"""Post-train several different language models together: command line, configuration, supervision, report.

`MutualTrainer`, `MutualConfig` and `Callback` are for programs and notebooks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agents.callbacks import Callback
    from mutualrl.trainer import MutualTrainer
    from mutualrl.trainer_config import MutualConfig

__all__ = ["Callback", "MutualConfig", "MutualTrainer"]

_HOMES = {
    "Callback": "agents.callbacks",
    "MutualConfig": "mutualrl.trainer_config",
    "MutualTrainer": "mutualrl.trainer",
}


def __getattr__(name: str) -> object:
    """Public names are imported when they are first used: the command line must answer without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
