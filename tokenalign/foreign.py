"""Work on what strangers wrote, by libraries that fail in their own ways, with one kind of error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenalign.errors import TokenAlignError


@contextmanager
def foreign(kind: type[TokenAlignError], what: str) -> Iterator[None]:
    """Raise an error of the kind, which begins with `what`, for whatever goes wrong inside; errors of this package,
    interrupts and exits pass."""
    try:
        yield
    except TokenAlignError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise kind(f"{what}: {error!r}") from error


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust: no Exception, of a type that cannot be imported."""
    return type(error).__name__ == "PanicException"
