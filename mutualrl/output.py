"""Standard output and error that may break without ending the run that writes to them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """Inside, a reader that is gone (`| head -1`, a closed terminal) or a full disk mutes what is printed, and no more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Unbreakable(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # the interpreter would fail to, when it ends
        sys.stdout, sys.stderr = before


class _Unbreakable:
    """A text stream that throws away what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._mute()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._mute()

    def _mute(self) -> None:
        """Send what is still buffered, and all that follows, nowhere: the interpreter flushes once more when it ends."""
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
