"""Decides for a hub's sockets whose key may connect, as the transport asks for each new connection (ZAP 1.0)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import zmq
from zmq.utils import z85

from exchange.errors import GuardError
from exchange.keys import Holder

__all__ = ["ZAP_DOMAIN", "ZAP_ENDPOINT", "Doorkeeper", "verdict"]

_log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"mutualrl"
_VERSION = b"1.0"


class Doorkeeper:
    """Answers on a socket that is bound to ZAP_ENDPOINT, as long as the loop runs; without an answer nobody gets in.

    It has no task that could end unnoticed: the loop calls it when there is a question. on_failure: told when it cannot go on.
    admitted: the user id of each public key (32 bytes); others are turned away.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], holders: Mapping[bytes, Holder], *, on_failure: Callable[[GuardError], None]
    ) -> None:
        self.admitted = {z85.decode(key): holder.user_id for key, holder in holders.items()}
        self._questions = socket
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._loop.add_reader(self._fd, self._look)
        self._look()  # the descriptor tells nothing to who has never looked

    def close(self) -> None:
        """Answer no more."""
        if not self._questions.closed:
            self._loop.remove_reader(self._fd)
            self._questions.close()

    def _look(self) -> None:
        try:
            while int(self._questions.get(zmq.EVENTS)) & zmq.POLLIN:
                answer = verdict(self._questions.recv_multipart(zmq.NOBLOCK), self.admitted)
                self._questions.send_multipart(answer, zmq.NOBLOCK)
        except Exception as error:  # the loop would only log it, and nobody could connect any more
            _log.exception("the keys of the hub's workers are no longer looked at")
            self.close()
            self._on_failure(GuardError(f"nobody can connect to the hub any more, its check of keys failed: {error!r}"))


def verdict(question: Sequence[bytes], admitted: Mapping[bytes, str]) -> list[bytes]:
    """The answer to one question. Only a CURVE key of the hub's own domain that is admitted gets a yes."""
    request_id = question[1] if len(question) > 1 else b""
    match question:
        case [version, _, domain, _, _, b"CURVE", key] if version == _VERSION and domain == ZAP_DOMAIN and key in admitted:
            return [_VERSION, request_id, b"200", b"OK", admitted[key].encode(), b""]
    return [_VERSION, request_id, b"400", b"not admitted", b"", b""]
