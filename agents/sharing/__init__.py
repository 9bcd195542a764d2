"""Sharing rules, one per file; the settings are in config.py, the interface in rule.py.

Importing this package stays cheap, since the config structs are read by the command line: `make_rule` loads the rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agents.sharing.config import HACPO, PRP, SGT, XGRPO, Graft, Isolated, SGTPlacebo, SharingConfig
from exchange.types import Kind

if TYPE_CHECKING:
    from agents.config import Objective
    from agents.sharing.rule import Receiver, SharingRule

KINDS: dict[type[SharingConfig], frozenset[Kind]] = {
    Isolated: frozenset(),
    PRP: frozenset({"rollouts"}),
    XGRPO: frozenset({"rewards"}),
    SGT: frozenset({"successes"}),
    SGTPlacebo: frozenset({"rollouts"}),
    HACPO: frozenset({"rollouts"}),
    Graft: frozenset({"rollouts"}),
}
"""Which experience each rule needs of its peers, by short name."""


def make_rule(config: SharingConfig, objective: Objective, receiver: Receiver, *, salt: str = "") -> SharingRule:
    """The rule that a config names. salt: makes what a rule draws by hash differ between agents and seeds."""
    from agents.sharing.graft import GraftRule
    from agents.sharing.hacpo import HACPORule
    from agents.sharing.isolated import IsolatedRule
    from agents.sharing.prp import PRPRule
    from agents.sharing.sgt import SGTRule
    from agents.sharing.sgt_placebo import SGTPlaceboRule
    from agents.sharing.xgrpo import XGRPORule

    match config:
        case Isolated():
            return IsolatedRule(config, objective, receiver)
        case PRP():
            return PRPRule(config, objective, receiver)
        case XGRPO():
            return XGRPORule(config, objective, receiver)
        case SGTPlacebo():
            return SGTPlaceboRule(config, objective, receiver, salt=salt)
        case SGT():
            return SGTRule(config, objective, receiver, salt=salt)
        case HACPO():
            return HACPORule(config, objective, receiver)
        case Graft():
            return GraftRule(config, objective, receiver)
