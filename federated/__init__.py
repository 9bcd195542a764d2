"""Aggregation of weights from several clients of one architecture; numpy only."""

from federated.errors import FederatedError, UpdateError
from federated.fedavg import Update, fedavg

__all__ = ["FederatedError", "Update", "UpdateError", "fedavg"]
