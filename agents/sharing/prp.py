"""`prp`: Peer Rollout Pooling. Whole peer rollouts, retokenised, enter the batch next to the own ones.

    A over R^n u R^m;  loss = own clipped surrogate + weight * peer clipped surrogate

Source: Mutual Reinforcement Learning (arXiv 2605.07244), which says it in words; the formula is ours. What the ratio of a
peer row divides by is ambiguous there, and the two readings test different things:

* denominator = "behaviour": rho_s = exp(sum over span s of log pi_n - the peer's log-prob of the span), one surrogate term
  per span (agents/objectives/peer_surrogate.py). An importance correction.
* denominator = "receiver": the receiver's own log-probs at the start of the step. A trust region and no correction; with
  one inner iteration the ratio is 1 and the clip never acts.

Published results have unguarded pooling below training alone, so guards are always on: at most `max_peer_share` of a
group's rows are peers', subsampled without looking at rewards; peer rows have a denominator of their own and a weight of at
most 0.5. Advantages stay over the union of own and kept peer rows, with the receiver's own rewards on both.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from agents.advantages import Advantages, batch_spread, group_advantages
from agents.config import Objective
from agents.rows import Row, Spans, Stream, own_rows
from agents.sharing.config import PRP
from agents.sharing.isolated import rewards_of
from agents.sharing.rule import PeerExperience, Peers, Receiver, Shared, newest_of_each_peer
from agents.sharing.texts import unpack
from agents.types import Group
from exchange.types import Kind, PromptId, RolloutGroup
from tokenalign import TokenAlignError, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeerRow:
    """One peer completion that the receiver can hold: its text, receiver ids, and the peer's log-probs by span."""

    text: bytes
    ids: npt.NDArray[np.int32]
    spans: Spans


class PRPRule:
    """Needs its peers' whole rollouts."""

    kinds: frozenset[Kind] = frozenset({"rollouts"})
    window = 0
    latest_only = True
    max_age_s: float | None = None

    def __init__(self, config: PRP, objective: Objective, receiver: Receiver) -> None:
        self._config = config
        self._objective = objective
        self._receiver = receiver
        self.max_lag: int | None = config.max_lag

    def wants(self, groups: Sequence[Group]) -> Sequence[PromptId]:
        return [group.prompt.id for group in groups]

    def open_prompts(self) -> Sequence[PromptId]:
        return ()

    async def share(self, groups: Sequence[Group], peers: Peers, *, step: int, steps: int, rng: np.random.Generator) -> Shared:
        counters: Counter[str] = Counter({"prp/peer_rows": 0, "prp/pooled_groups": 0})
        kept = [self._keep(group, peers.get(group.prompt.id, ()), rng) for group in groups]
        peer_rewards = await self._rewards(groups, kept)
        unions = [np.concatenate([rewards_of(group), theirs]) for group, theirs in zip(groups, peer_rewards, strict=True)]
        batch_std = batch_spread(unions)
        advantages = [group_advantages(union, self._objective, batch_std) for union in unions]
        own = [each[: len(group.completions)] for group, each in zip(groups, advantages, strict=True)]
        rows = own_rows(groups, own, self._objective)
        for group, rows_kept, each in zip(groups, kept, advantages, strict=True):
            rows += self._rows(group, rows_kept, each[len(group.completions) :])
            counters["prp/peer_rows"] += len(rows_kept)
            counters["prp/pooled_groups"] += bool(rows_kept)
        return Shared(rows=rows, counters=dict(counters))

    def _rows(self, group: Group, kept: Sequence[_PeerRow], advantages: Advantages) -> list[Row]:
        return [
            Row(
                stream=Stream.PEER,
                prompt_ids=group.prompt_ids,
                ids=row.ids,
                advantage=float(advantage),
                weight=self._config.weight,
                spans=row.spans if self._config.denominator == "behaviour" else None,
            )
            for row, advantage in zip(kept, advantages, strict=True)
            if not np.isnan(advantage)
        ]

    async def _rewards(self, groups: Sequence[Group], kept: Sequence[Sequence[_PeerRow]]) -> list[npt.NDArray[np.float32]]:
        """The receiver's own rewards on the kept peer rows, one array per group, from one call."""
        prompts = [group.prompt for group, rows in zip(groups, kept, strict=True) for _ in rows]
        texts = [row.text for rows in kept for row in rows]
        rewards = await self._receiver.verify(prompts, texts) if texts else np.empty(0, dtype=np.float32)
        return np.split(rewards, np.cumsum([len(rows) for rows in kept])[:-1]) if kept else []

    def _keep(self, group: Group, experience: Sequence[PeerExperience], rng: np.random.Generator) -> list[_PeerRow]:
        """Translate the newest group of each peer and keep a share of it, drawn without looking at rewards."""
        newest = newest_of_each_peer(experience, RolloutGroup)
        offered = [(record, index, text) for record in newest for index, text in enumerate(unpack(record))]
        most = self._most_peer_rows(group)
        order = [offered[int(chosen)] for chosen in rng.permutation(len(offered))]
        if self._objective.mask_truncated_completions:
            order = [each for each in order if each[2].finished]
        kept: list[_PeerRow] = []
        while order and len(kept) < most:
            drawn, order = order[: most - len(kept)], order[most - len(kept) :]
            kept += self._translate(drawn)
        return kept

    def _most_peer_rows(self, group: Group) -> int:
        """How many peer rows may stand beside the own rows that enter the batch, so that they are `max_peer_share` of all."""
        present = ~np.isnan(rewards_of(group))
        if self._objective.mask_truncated_completions:
            present &= np.array([completion.finished for completion in group.completions])
        share = Fraction(self._config.max_peer_share).limit_denominator(1000)
        return int(int(present.sum()) * share / (1 - share))

    def _translate(self, drawn: Sequence[tuple[RolloutGroup, int, Trace]]) -> list[_PeerRow]:
        """Those rows that the receiver can hold; it counts the ones that it refuses."""
        rows: list[_PeerRow] = []
        foreign = [trace for record, _, trace in drawn if record.tokenizer != self._receiver.tokenizer_fingerprint]
        translated = self._receiver.translate(foreign)
        numbers = iter(range(len(foreign)))
        for record, index, trace in drawn:
            with contextlib.suppress(TokenAlignError):
                if record.tokenizer == self._receiver.tokenizer_fingerprint:
                    rows.append(self._adopt(record, index, trace))
                else:
                    own = translated[next(numbers)]
                    assert own.alignment is not None and own.span_logprobs is not None
                    spans = Spans(span=own.alignment.group_b, logprobs=own.span_logprobs)
                    rows.append(_PeerRow(text=trace.text, ids=own.ids, spans=spans))
        return rows

    def _adopt(self, record: RolloutGroup, index: int, trace: Trace) -> _PeerRow:
        stop = int(record.token_counts[: index + 1].sum())
        ids = self._receiver.adopt(trace, record.ids[stop - int(record.token_counts[index]) : stop])
        logprobs = np.asarray(trace.logprobs, np.float64)
        span = np.arange(len(ids), dtype=np.int32)
        span[len(logprobs) :] = -1
        return _PeerRow(text=trace.text, ids=ids, spans=Spans(span=span, logprobs=logprobs))
