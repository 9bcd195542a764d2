"""The sharing rules' settings: one struct per rule, told apart by `rule`.

A rule belongs to the agent that receives. Formulas and sources stand in the rule's own file beside this one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from agents.bounds import LONG_S, MANY, check_range


class Isolated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="isolated"):
    """Plain GRPO on the agent's own rollouts; nothing is asked of peers."""


class PRP(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="prp"):
    """Peer Rollout Pooling: whole peer rollouts enter the batch. Known to harm policies; the guards are on by default.

    denominator: "behaviour" (the peer's own log-probs, carried over spans) or "receiver" (the receiver's log-probs at the
    start of the step). max_peer_share: most of a pooled group that may be peer rows. weight: of the peer rows' loss.
    max_lag: in producer versions.
    """

    denominator: Literal["behaviour", "receiver"] = "behaviour"
    max_peer_share: float = 0.5
    weight: float = 0.5
    max_lag: int = 8

    def __post_init__(self) -> None:
        check_range(self, "max_peer_share", gt=0, le=0.5)
        check_range(self, "weight", gt=0, le=0.5)
        check_range(self, "max_lag", ge=0, le=MANY)


class XGRPO(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="xgrpo"):
    """Cross-Policy GRPO Advantage Sharing: peers' rewards enter the baseline, their rollouts do not.

    peer_share: weight a of the peers' mean in the baseline; None weights by group size (the union's mean).
    std: over the "union" of rewards or the agent's "own". max_lag: in producer versions.
    """

    peer_share: float | None = None
    std: Literal["union", "own"] = "union"
    max_lag: int = 32

    def __post_init__(self) -> None:
        check_range(self, "peer_share", ge=0, le=1)
        check_range(self, "max_lag", ge=0, le=MANY)


class SGT(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="sgt"):
    """Success-Gated Transfer: imitate one verified peer success on each prompt where all own rollouts failed.

    lambda: weight of the imitation loss; lambda_final: its value at the last step (linear in between), None keeps it.
    threshold: reward from which a rollout is a success. normalise: "step" divides by the step's prompts, "rescued" by the
    rescued ones. gate: "off" learns from every peer success, rescued or not (a control). window: steps for which an own
    failure waits for a late success. max_age_s: how old a peer success may be, by the hub's clock. coin: share of the
    rescued prompts, drawn by hash, whose success is left undelivered, so that a run measures within itself what a rescue
    does (agents/trial.py).
    """

    lambda_: float = msgspec.field(default=0.1, name="lambda")
    lambda_final: float | None = None
    threshold: float = 1.0
    normalise: Literal["step", "rescued"] = "step"
    gate: Literal["on", "off"] = "on"
    window: int = 8
    max_age_s: float = 3600.0
    coin: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "lambda_", "lambda_final", ge=0)
        check_range(self, "window", ge=0, le=MANY)
        check_range(self, "max_age_s", gt=0, le=LONG_S)
        check_range(self, "coin", ge=0, lt=1)


class SGTPlacebo(SGT, frozen=True, kw_only=True, tag="sgt_placebo"):
    """A control for `sgt`: the same gate and path, but the peer's *wrong* text is imitated where it has a success too.

    What is gained under it was taught by form, length and endings alone. It needs the peers' whole rollouts.
    """


class HACPO(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="hacpo"):
    """Heterogeneous Agent Collaborative Policy Optimization: all peer rollouts, weighted by capability and by ratio.

    alpha: how much more than a plain importance weight a small sequence ratio weakens a peer row (0: not). min_ratio:
    sequence ratio below which a peer row has no weight (1 - delta in the paper). capability_window: batches over which an
    agent's capability is its mean reward. max_capability_ratio: bound of the quotient of two capabilities, and of its
    inverse. max_lag: in producer versions.
    """

    alpha: float = 1.0
    min_ratio: float = 0.8
    capability_window: int = 5
    max_capability_ratio: float = 4.0
    max_lag: int = 8

    def __post_init__(self) -> None:
        check_range(self, "alpha", ge=0, le=100)
        check_range(self, "min_ratio", ge=0, le=1)
        check_range(self, "capability_window", ge=1, le=MANY)
        check_range(self, "max_capability_ratio", ge=1)
        check_range(self, "max_lag", ge=0, le=MANY)


class Graft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="rule", tag="graft"):
    """A group that failed throughout is replaced by a peer's group on the same prompt in which some succeeded.

    threshold: reward from which a rollout is a success. min_ratio: sequence ratio below which a grafted row has no weight.
    max_lag: in producer versions.
    """

    threshold: float = 1.0
    min_ratio: float = 0.8
    max_lag: int = 8

    def __post_init__(self) -> None:
        check_range(self, "min_ratio", ge=0, le=1)
        check_range(self, "max_lag", ge=0, le=MANY)


SharingConfig = Isolated | PRP | XGRPO | SGT | SGTPlacebo | HACPO | Graft
