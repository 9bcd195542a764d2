"""Errors of the tokenalign package; all picklable, each leaf also a stdlib error."""

from __future__ import annotations


class TokenAlignError(Exception):
    """Root of this package's errors."""


class TableError(TokenAlignError, ValueError):
    """A tokenizer cannot be read into a table, or token ids are not of the table that they were given to."""


class SourceError(TokenAlignError, ValueError):
    """A tokenizer cannot be had or read: no such file, an unknown format, a library or a registry that is missing."""


class TextError(TokenAlignError, ValueError):
    """A text is not valid UTF-8, or a tokenizer gave up on it."""


class AlignmentError(TokenAlignError, ValueError):
    """Two tokenizations are not of the same bytes, or a trace does not fit its alignment."""


class RoleError(TokenAlignError, ValueError):
    """A special token has no counterpart at the receiver, or stands where it cannot."""


class TooLongError(TokenAlignError, ValueError):
    """A text takes more of the receiver's tokens than allowed."""
