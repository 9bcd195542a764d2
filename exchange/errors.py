"""Errors of the exchange package; all picklable, each leaf also a stdlib error."""

from __future__ import annotations


class ExchangeError(Exception):
    """Root of this package's errors."""


class EndpointError(ExchangeError, ValueError):
    """An endpoint cannot be used: bad address, not private, or taken."""


class KeysError(ExchangeError, ValueError):
    """Keys cannot be made or used: missing, open to others, damaged, or of names that cannot be."""


class GuardError(ExchangeError, RuntimeError):
    """The keys of a hub do not guard it: the transport is too old, or lets in whom it should not, or nobody at all."""


class ConnectError(ExchangeError, ConnectionError):
    """No WELCOME came from the hub, or it refused the worker."""


class HubLostError(ExchangeError, ConnectionError):
    """The hub has ended, or went silent and did not come back in time. The client is of no more use: connect again."""


class RequestTimeoutError(ExchangeError, TimeoutError):
    """The hub is alive but did not answer one request in time."""


class ClosedError(ExchangeError, RuntimeError):
    """The client was used after its `async with` block ended."""


class WireError(ExchangeError, ValueError):
    """Bytes that are not a well-formed message or record."""


class ProtocolError(WireError):
    """A message of another protocol version."""


class RecordTooLargeError(ExchangeError, ValueError):
    """A record that would not fit into the hub's limits; nothing was sent."""


class GapError(ExchangeError, LookupError):
    """Rows behind cursor `after`, up to `to`, may be missing from a subscription: the hub let them go, or restarted."""

    def __init__(self, after: int, to: int) -> None:
        super().__init__(after, to)
        self.after = after
        self.to = to

    def __str__(self) -> str:
        return (
            f"the hub no longer has all rows, got after={self.after} where some up to {self.to} are gone: iterate again to "
            f"go on behind them, and read faster, raise the exchange's `memory_bytes`, or give it a disk with room"
        )


class RequestFailedError(ExchangeError, RuntimeError):
    """The peer's handler raised while it answered a request; the text is its error's, without the traceback."""


class RefusedError(ExchangeError, ValueError):
    """The hub refused a record or a request. reason: one word for programs; detail: the sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"refused ({self.reason}): {self.detail}"


class LeaseLostError(ExchangeError, RuntimeError):
    """A lease had ended before its holder renewed it or said what became of it: another worker may have its records."""


class BlobError(ExchangeError, ValueError):
    """A blob is not what its name says: its bytes changed on their way, while they were sent, or in a store."""


class StorageError(ExchangeError, OSError):
    """The disk of an exchange cannot be used as it is: full, failing, damaged, held by another hub, or of another run.

    errno is set when the system gave one.
    """


class CorruptIndexError(StorageError):
    """The index of an exchange is damaged; it can be rebuilt from the segments."""
