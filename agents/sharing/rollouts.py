"""Peers' rollouts as rows that the receiver can hold: own ids, and the author's log-probs over spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.rows import Spans
from agents.sharing.rule import Receiver
from agents.sharing.texts import unpack
from agents.types import Group
from exchange.types import RolloutGroup
from tokenalign import TokenAlignError, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """Completion `index` of a peer's group, as it came."""

    record: RolloutGroup
    index: int
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """One peer completion that the receiver can hold: the offer, receiver ids, and the peer's log-probs by span."""

    source: Offered
    ids: npt.NDArray[np.int32]
    spans: Spans


def offers(record: RolloutGroup) -> list[Offered]:
    """The completions of a peer's group, in order."""
    return [Offered(record=record, index=index, trace=trace) for index, trace in enumerate(unpack(record))]


async def judge(
    groups: Sequence[Group], offered: Sequence[Sequence[Offered]], receiver: Receiver
) -> list[npt.NDArray[np.float32]]:
    """The receiver's own rewards on what peers offer on each group's prompt: one array per group, from one call."""
    prompts = [group.prompt for group, each in zip(groups, offered, strict=True) for _ in each]
    texts = [one.trace.text for each in offered for one in each]
    rewards = await receiver.verify(prompts, texts) if texts else np.empty(0, dtype=np.float32)
    return np.split(rewards, np.cumsum([len(each) for each in offered])[:-1]) if offered else []


def receive(offered: Sequence[Offered], receiver: Receiver) -> list[PeerRow | None]:
    """One row per completion, None where the receiver cannot hold it; it counts the ones that it refuses.

    Sampled ids of an equal tokenizer are kept, each token a span of its own; all others are translated.
    """
    rows: list[PeerRow | None] = []
    foreign = [each.trace for each in offered if each.record.tokenizer != receiver.tokenizer_fingerprint]
    translated = receiver.translate(foreign)
    numbers = iter(range(len(foreign)))
    for each in offered:
        try:
            if each.record.tokenizer == receiver.tokenizer_fingerprint:
                rows.append(_adopt(each, receiver))
            else:
                own = translated[next(numbers)]
                assert own.alignment is not None and own.span_logprobs is not None
                spans = Spans(span=own.alignment.group_b, logprobs=own.span_logprobs)
                rows.append(PeerRow(source=each, ids=own.ids, spans=spans))
        except TokenAlignError:
            rows.append(None)
    return rows


def _adopt(offered: Offered, receiver: Receiver) -> PeerRow:
    record, index = offered.record, offered.index
    stop = int(record.token_counts[: index + 1].sum())
    ids = receiver.adopt(offered.trace, record.ids[stop - int(record.token_counts[index]) : stop])
    logprobs = np.asarray(offered.trace.logprobs, np.float64)
    span = np.arange(len(ids), dtype=np.int32)
    span[len(logprobs) :] = -1
    return PeerRow(source=offered, ids=ids, spans=Spans(span=span, logprobs=logprobs))
