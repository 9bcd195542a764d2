"""Which loss components an objective and a sharing rule need."""

from __future__ import annotations

from agents.objectives.component import Component
from agents.objectives.config import Objective
from agents.objectives.grpo import GRPOSurrogate
from agents.objectives.kl import KLToReference
from agents.objectives.nll import SuccessNLL
from agents.objectives.peer_sequence import PeerSequencePolicy
from agents.objectives.peer_surrogate import PeerSurrogate
from agents.sharing.config import HACPO, PRP, SGT, XGRPO, Graft, Isolated, SharingConfig


def components(objective: Objective, sharing: SharingConfig, *, max_completion_length: int) -> tuple[Component, ...]:
    """The own stream's terms, and the one that the sharing rule's rows get."""
    own: tuple[Component, ...] = (GRPOSurrogate(objective, max_completion_length),)
    if objective.beta > 0:
        own += (KLToReference(objective, max_completion_length),)
    match sharing:
        case Isolated() | XGRPO():
            return own
        case PRP():
            return (*own, PeerSurrogate(objective, max_completion_length))
        case SGT():
            return (*own, SuccessNLL(sharing))
        case HACPO():
            return (*own, PeerSequencePolicy(alpha=sharing.alpha, min_ratio=sharing.min_ratio))
        case Graft():
            return (*own, PeerSequencePolicy(alpha=0.0, min_ratio=sharing.min_ratio))
