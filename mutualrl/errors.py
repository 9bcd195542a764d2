"""Errors of the mutualrl package; all picklable, each leaf also a stdlib error."""

from __future__ import annotations


class MutualRLError(Exception):
    """Root of this package's errors."""


class ConfigError(MutualRLError, ValueError):
    """A run file or an override cannot be used. The text holds one line per problem, each with its dotted path."""


class RunDirError(MutualRLError, OSError):
    """A run directory is in use, already holds something, cannot be made, or is none."""


class InputError(MutualRLError, ValueError):
    """A text or a tokenizer that a command was given cannot be had, read or used; the text says why."""


class ReportError(MutualRLError, RuntimeError):
    """A report cannot be made here; the text says what to install."""
