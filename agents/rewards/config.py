"""Settings of a reward function in a process of its own."""

from __future__ import annotations

import msgspec

from agents.bounds import check_range


class SandboxedReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward function that runs in a process of its own: what it does there can neither stall nor end the agent.

    sandbox: its built-in name or import string. timeout_s: wall and CPU time that one call, with all completions of a
    step, may take; the process of a longer one is killed and a new one started. memory_bytes: address space.
    It guards against functions that hang, crash or hoard memory, not against hostile code: files and network stay open.
    """

    sandbox: str
    timeout_s: float = 60.0
    memory_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        check_range(self, "timeout_s", gt=0, le=86_400)
        check_range(self, "memory_bytes", ge=2**28, le=2**50)
