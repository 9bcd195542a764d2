"""Which records the hub takes: whole, of a known kind, by their producer, of its present epoch."""

from __future__ import annotations

from collections.abc import Sequence

from exchange.errors import RefusedError, WireError
from exchange.members import Member
from exchange.messages import Publish
from exchange.store import Record
from exchange.types import AnyExperience, Cursor, kind_of, prompt_ids_of
from exchange.wire import MAX_BODY_BYTES, MAX_RECORD_BYTES, Buffer, Encoded, RecordDecoder

__all__ = ["Admission"]

_KNOWN_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in AnyExperience.__args__)
# Below this a received frame pins far more memory than it holds.
PINNED_BYTES = 64 << 10


class Admission:
    """Turns publications into records, or refuses them. max_record_bytes: never above the hub's whole memory."""

    def __init__(self, *, memory_bytes: int) -> None:
        self.max_record_bytes = min(MAX_RECORD_BYTES, memory_bytes // 2)
        self._decoder = RecordDecoder()

    def admit(self, member: Member, publish: Publish, payload: Sequence[memoryview], *, cursor: Cursor, now: float) -> Record:
        """The record to store at `cursor`. Raises RefusedError with the reason."""
        nbytes = len(publish.body) + sum(frame.nbytes for frame in payload)
        if nbytes > self.max_record_bytes or len(publish.body) > MAX_BODY_BYTES:
            limits = f"{self.max_record_bytes} bytes here, {MAX_BODY_BYTES} beside its arrays"
            raise RefusedError("too_large", f"a record has at most {limits}, got {nbytes} and {len(publish.body)}")
        experience = self._decode(publish.body, payload)
        _check_origin(member, experience)
        return Record(
            cursor=cursor,
            kind=kind_of(experience),
            agent=experience.agent,
            prompt_ids=prompt_ids_of(experience),
            step=experience.step,
            version=experience.version,
            encoded=Encoded(body=publish.body, frames=tuple(map(_own, payload))),
            stored_at=now,
        )

    def _decode(self, body: bytes, payload: Sequence[memoryview]) -> AnyExperience:
        try:
            return self._decoder.decode(body, payload)
        except WireError as error:
            tag = self._decoder.tag(body)
            if tag is not None and tag not in _KNOWN_TAGS:
                known = ", ".join(sorted(_KNOWN_TAGS))
                raise RefusedError("unsupported", f"this hub knows {known}, got type={tag!r}") from error
            raise RefusedError("malformed", str(error)) from error


def _check_origin(member: Member, experience: AnyExperience) -> None:
    version = experience.version
    if experience.agent != member.name:
        detail = f"a worker publishes in its own name {member.name!r}, got agent={experience.agent!r}"
        raise RefusedError("not_yours", detail)
    if experience.step < 0 or version.step < 0:
        detail = f"steps count from 0, got step={experience.step}, version.step={version.step}"
        raise RefusedError("invalid", detail)
    if version.epoch < member.epoch:
        detail = f"the epoch of {member.name!r} is {member.epoch}, got version.epoch={version.epoch} of a former life"
        raise RefusedError("fenced", detail)
    if version.epoch > member.epoch:
        detail = f"the epoch of {member.name!r} is {member.epoch}, got version.epoch={version.epoch} from the future"
        raise RefusedError("future", detail)


def _own(frame: memoryview) -> Buffer:
    return bytes(frame) if frame.nbytes < PINNED_BYTES else frame
