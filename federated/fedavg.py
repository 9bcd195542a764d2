"""FedAvg: the weighted mean of the clients' deltas, applied to the global weights.

    theta <- theta + eta * sum_i w_i Delta_i,    w_i = n_i / sum_j n_j

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", arXiv 1602.05629,
algorithm 1, written with deltas. Deviations: none. Sums are taken in float64 in the order of the client names, so the
order of arrival never shows. One client and eta = 1 give that client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.errors import UpdateError

Weights = Mapping[str, npt.NDArray[np.floating]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one client learned since it took the global weights.

    client: its name, unique among the updates that are aggregated. samples: n_i > 0. delta: by parameter name, in the
    global weights' shapes.
    """

    client: str
    samples: float
    delta: Weights


def check(update: Update, weights: Weights) -> None:
    """Raise UpdateError unless the update fits the global weights: names, shapes, finite values, samples > 0."""
    if not update.samples > 0:
        raise UpdateError(f"update of {update.client!r}: `samples` must be > 0, got samples={update.samples!r}")
    if unknown := update.delta.keys() ^ weights.keys():
        raise UpdateError(f"update of {update.client!r}: parameters differ from the global ones in {sorted(unknown)[:3]}")
    for name, delta in update.delta.items():
        if delta.shape != weights[name].shape:
            raise UpdateError(f"update of {update.client!r}: `{name}` must have shape {weights[name].shape}, got {delta.shape}")
        if not np.isfinite(delta).all():
            raise UpdateError(f"update of {update.client!r}: `{name}` must be finite, got NaN or infinity")


def fedavg(weights: Weights, updates: Sequence[Update], *, eta: float = 1.0) -> dict[str, npt.NDArray[np.floating]]:
    """The new global weights, in the dtypes of the old ones; `weights` and `updates` stay as they are.

    Raises UpdateError for no updates, two of one client, or one that does not fit (see `check`).
    """
    if not updates:
        raise UpdateError("`updates` must hold at least one update, got none")
    ordered = sorted(updates, key=lambda update: update.client)
    names = [update.client for update in ordered]
    if len(set(names)) < len(names):
        raise UpdateError(f"each client may send one update to an aggregation, got {', '.join(names)}")
    for update in ordered:
        check(update, weights)
    total = sum(update.samples for update in ordered)
    result = {}
    for name, value in weights.items():
        mean = sum((update.delta[name].astype(np.float64) * (update.samples / total) for update in ordered), np.float64(0))
        result[name] = (value.astype(np.float64) + eta * mean).astype(value.dtype)
    return result
