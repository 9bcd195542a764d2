"""Errors of the agents package; all picklable, each leaf also a stdlib error."""

from __future__ import annotations


class AgentError(Exception):
    """Root of this package's errors."""


class TaskError(AgentError, ValueError):
    """A task or its data cannot be used."""


class RewardError(AgentError, ValueError):
    """A reward function is unknown, misshapen, or failed."""


class PolicyError(AgentError, ValueError):
    """A policy cannot be built or cannot hold what it is asked to."""


class ObjectiveError(AgentError, ValueError):
    """A training batch cannot be turned into a loss."""


class NonFiniteError(AgentError, ArithmeticError):
    """Losses or gradients stayed non-finite for too many steps in a row."""


class PeerTimeoutError(AgentError, TimeoutError):
    """A peer did not close a step in time, in lockstep."""


class SamplerError(AgentError, RuntimeError):
    """A sampler's process ended, broke its protocol, or did not take the policy's weights."""


class SamplerTimeoutError(AgentError, TimeoutError):
    """A sampler's process did not answer in time."""


class CheckpointError(AgentError, ValueError):
    """A checkpoint or a dumped step cannot be read, or does not fit."""


class CallbackError(AgentError, RuntimeError):
    """A callback failed; the text names it."""


class StalenessError(AgentError, RuntimeError):
    """Samples are of weights too old to be trained on, or of weights that do not exist."""
