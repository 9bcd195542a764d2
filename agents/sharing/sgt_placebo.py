"""`sgt_placebo`: a control for Success-Gated Transfer. Everything as in `sgt`, but the text is one that the peer got wrong.

A prompt is rescued where all own rollouts failed and the peer has a success, as in `sgt`; imitated is a finished completion
of the same group that failed, and that the receiver's own reward calls a failure too. Gate, draw, translation, loss and
weight are those of `sgt`: what is learned here was taught by form, length and endings. Source: ours.

Deviation from the same gate: a peer group without a finished failure offers nothing, so that there are fewer rescues.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.sharing.rule import PeerExperience
from agents.sharing.sgt import SGTRule
from agents.sharing.texts import unpack
from exchange.types import AgentName, Kind, RolloutGroup
from tokenalign import Trace


class SGTPlaceboRule(SGTRule):
    """Needs its peers' whole rollouts."""

    kinds: frozenset[Kind] = frozenset({"rollouts"})

    def _texts(self, experience: Sequence[PeerExperience]) -> dict[AgentName, list[Trace]]:
        by_peer: dict[AgentName, list[Trace]] = {}
        for record in experience:
            if isinstance(record, RolloutGroup) and self._has_success(record):
                failed = record.finished & (record.rewards < self._config.threshold)
                by_peer.setdefault(record.agent, []).extend(
                    text for text, wrong in zip(unpack(record), failed, strict=True) if wrong
                )
        return {peer: texts for peer, texts in by_peer.items() if texts}

    def _has_success(self, record: RolloutGroup) -> bool:
        return bool((record.finished & (record.rewards >= self._config.threshold)).any())

    def _holds(self, reward: float) -> bool:
        return reward < self._config.threshold
