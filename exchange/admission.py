"""Which records the hub takes: by their producer, of its present epoch, and of a kind that need not be known here.

Only the fields that every experience has are decoded. The rest is handed on as it came: whether its arrays are whole is for
each reader to see, who must check that anyway, and reading them here too would cost a third of all that a hub does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from exchange.arrays import OWN_BYTES, plausible
from exchange.depth import check_depth
from exchange.errors import RefusedError
from exchange.kinds import is_tag
from exchange.members import Member
from exchange.message_base import MAX_KINDS
from exchange.messages import Publish
from exchange.store import Record
from exchange.types import AgentName, Cursor, Kind, PromptId, Version, kind_of_tag
from exchange.wire import MAX_BODY_BYTES, MAX_RECORD_BYTES, Buffer, Encoded

__all__ = ["Admission"]


class _Any(msgspec.Struct, frozen=True, kw_only=True):
    """What every experience has, of whatever kind it is. type: its tag."""

    type: str
    agent: AgentName
    step: int
    version: Version
    prompt_id: PromptId | None = None
    prompt_ids: tuple[PromptId, ...] = ()


class Admission:
    """Turns publications into records, or refuses them. max_record_bytes: never above the hub's whole memory."""

    def __init__(self, *, memory_bytes: int) -> None:
        self.max_record_bytes = min(MAX_RECORD_BYTES, memory_bytes // 2)
        self._memory_bytes = memory_bytes
        self._decoder = msgspec.msgpack.Decoder(_Any)
        self._kinds: set[Kind] = set()

    def admit(self, member: Member, publish: Publish, payload: Sequence[memoryview], *, cursor: Cursor, now: float) -> Record:
        """The record to store at `cursor`. Raises RefusedError with the reason."""
        nbytes = len(publish.body) + sum(map(len, payload))
        if nbytes > self.max_record_bytes or len(publish.body) > MAX_BODY_BYTES:
            limits = f"{self.max_record_bytes} bytes here, {MAX_BODY_BYTES} beside its arrays"
            raise RefusedError("too_large", f"a record has at most {limits}, got {nbytes} and {len(publish.body)}")
        if not plausible(payload):
            raise RefusedError("malformed", f"only large arrays have frames of their own, got {len(payload)} of {nbytes} bytes")
        experience = self._decode(publish.body)
        _check_origin(member, experience)
        kind = kind_of_tag(experience.type)
        self._count_kind(kind)
        record = Record(
            cursor=cursor,
            kind=kind,
            agent=experience.agent,
            prompt_ids=experience.prompt_ids if experience.prompt_id is None else (experience.prompt_id,),
            step=experience.step,
            version=experience.version,
            encoded=Encoded(body=publish.body, frames=tuple(map(_own, payload))),
            stored_at=now,
        )
        if record.cost_bytes > self._memory_bytes:
            detail = f"a hub of memory_bytes={self._memory_bytes} cannot hold {len(record.prompt_ids)} prompts in one record"
            raise RefusedError("too_large", f"{detail}: publish fewer at a time, or raise it")
        return record

    def _decode(self, body: bytes) -> _Any:
        try:
            check_depth(body)
            experience = self._decoder.decode(body)
        except Exception as error:  # foreign bytes
            raise RefusedError("malformed", f"record cannot be decoded: {error}") from error
        if not is_tag(experience.type):
            detail = f"a tag is a name and a version such as critiques/1, got type={experience.type!r}"
            raise RefusedError("unsupported", detail)
        return experience

    def _count_kind(self, kind: Kind) -> None:
        if kind in self._kinds:
            return
        if len(self._kinds) >= MAX_KINDS:
            raise RefusedError("too_many", f"a hub takes {MAX_KINDS} kinds of experience, got one more: {kind!r}")
        self._kinds.add(kind)


def _check_origin(member: Member, experience: _Any) -> None:
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
    """A frame as it came, which has a buffer of its own, unless it is small: that would pin many times its size."""
    return bytes(frame) if len(frame) < OWN_BYTES else frame
