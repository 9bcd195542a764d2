"""Keys for a hub and workers on several machines: makes them, and says which file goes where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exchange.errors import KeysError
from exchange.keys import make_keys
from mutualrl.errors import InputError


def run_keys(directory: Path, names: Sequence[str], *, observers: Sequence[str]) -> None:
    """Make a pair for each name, and the hub's unless it is there. Raises InputError, and then may have made some."""
    try:
        made = make_keys(directory, names, observers=observers)
    except KeysError as error:
        raise InputError(str(error)) from error
    print(f"made in {directory}: {', '.join(path.name for path in made)}")
    print("the hub's machine needs hub.key_secret and every .key file")
    for name in (*names, *observers):
        print(f"{name}'s machine needs {name}.key_secret and hub.key")
    print("a .key_secret belongs on no other machine; copy it over ssh, keep its mode 600, and remove it here")
