"""How completions are drawn, and by what."""

from __future__ import annotations

from typing import Literal

import msgspec

from agents.bounds import LONG_S, MANY, check_range


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How completions are drawn in training. Evaluation is greedy with the same `max_completion_length`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 16
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range(self, "temperature", gt=0, le=10)
        check_range(self, "top_p", gt=0, le=1)
        check_range(self, "top_k", ge=0, le=MANY)
        check_range(self, "max_completion_length", ge=1, le=2**20)
        if "" in self.stop:
            raise ValueError(f"`stop` must hold no empty string, which every text contains, got stop={self.stop!r}")


class InProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="hf"):
    """The model that is trained draws its own completions, in the agent's process."""


class VLLM(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="vllm"):
    """A vLLM engine in a process of its own, which gets the weights after each step.

    python: an interpreter that has vLLM (`make venv-vllm` builds one for CPUs). kv_cache_memory_bytes: the engine's room
    for keys and values. enforce_eager: no compilation and no CUDA graphs; starts sooner, runs slower. dtype: "auto" takes
    the policy's. start_timeout_s: from the start of the process to its readiness. request_timeout_s: for the completions of
    a step, and for taking new weights.
    """

    python: str = ".venv-vllm/bin/python"
    kv_cache_memory_bytes: int = 2**30
    enforce_eager: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.python:
            raise ValueError("`python` must name an interpreter that has vLLM, got python=''")
        check_range(self, "kv_cache_memory_bytes", ge=2**20, le=2**50)
        check_range(self, "start_timeout_s", "request_timeout_s", gt=0, le=LONG_S)


SamplerConfig = InProcess | VLLM
