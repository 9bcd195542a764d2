"""The run file that `mutualrl init` writes."""

from __future__ import annotations

from pathlib import Path

from mutualrl.errors import ConfigError

STARTER = Path(__file__).with_name("starter.toml")


def write_starter(path: Path) -> None:
    """Write the commented starter file; ConfigError if something is at `path` already."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{path} exists already; give another path, or remove it") from None
    except FileNotFoundError:
        raise ConfigError(f"no directory {path.parent} to write {path.name} into") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
