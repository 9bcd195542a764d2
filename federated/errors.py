"""Errors of the federated package; all picklable, each leaf also a stdlib error."""

from __future__ import annotations


class FederatedError(Exception):
    """Root of this package's errors."""


class UpdateError(FederatedError, ValueError):
    """An update cannot take part in an aggregation; the text names the client and the reason."""
