"""Which sampler a config names."""

from __future__ import annotations

from pathlib import Path

from agents.config import AgentConfig
from agents.policies.policy import Policy
from agents.samplers.config import VLLM, InProcess
from agents.samplers.hf import HFSampler
from agents.samplers.sampler import Sampler
from agents.samplers.vllm import VLLMSampler


def build_sampler(config: AgentConfig, policy: Policy, *, log: Path) -> Sampler:
    """The agent's sampler for its policy. log: for the output of a process of its own, if it has one."""
    match config.sampler:
        case InProcess():
            return HFSampler(policy, config.sampling)
        case VLLM():
            return VLLMSampler(policy, config.sampling, config.sampler, threads=config.threads, log=log)
