"""What a client makes of the hub's answers."""

from __future__ import annotations

from typing import TypeVar, cast

from exchange.errors import LeaseLostError, RefusedError, WireError
from exchange.messages import Refused, ToWorker
from exchange.session import Answer

__all__ = ["expect"]

T = TypeVar("T", bound=ToWorker)


def expect(kind: type[T], answer: Answer) -> T:
    """The answer as the message that it should be. Raises RefusedError (LeaseLostError for a lease), WireError."""
    message = answer.message
    if isinstance(message, Refused):
        if message.reason == "lease_lost":
            raise LeaseLostError(message.detail)
        raise RefusedError(message.reason, message.detail)
    if not isinstance(message, kind):
        raise WireError(f"the hub answered with {type(message).__name__} where {kind.__name__} was expected")
    return cast(T, message)
