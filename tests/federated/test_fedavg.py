"""FedAvg: numbers by hand, its limits, and updates that do not fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated import Update, UpdateError, fedavg

WEIGHTS = {"w": np.array([1.0, 2.0]), "b": np.array([[0.5]], dtype=np.float32)}


def update(client: str, w: list[float], b: float = 0.0, *, samples: float = 1.0) -> Update:
    return Update(client=client, samples=samples, delta={"w": np.array(w), "b": np.array([[b]])})


def test_by_hand() -> None:
    # (3 * [1, 0] + 1 * [5, 4]) / 4 = [2, 1], times eta 0.5
    got = fedavg(WEIGHTS, [update("a", [1, 0], samples=3), update("b", [5, 4], 2.0)], eta=0.5)
    np.testing.assert_array_equal(got["w"], [2.0, 2.5])
    np.testing.assert_array_equal(got["b"], [[0.75]])
    assert got["b"].dtype == np.float32


def test_one_client_gives_that_client() -> None:
    client = {"w": np.array([0.1, -7.3]), "b": np.array([[1e-9]])}
    base = {name: value.astype(np.float64) for name, value in WEIGHTS.items()}
    got = fedavg(base, [Update(client="a", samples=7, delta={name: client[name] - base[name] for name in base})])
    for name, value in client.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-15)


@given(st.permutations(range(5)))
def test_the_order_of_arrival_does_not_show(order: list[int]) -> None:
    rng = np.random.default_rng(0)
    updates = [update(f"c{index}", list(rng.normal(size=2)), samples=index + 1) for index in range(5)]
    expected = fedavg(WEIGHTS, updates)
    got = fedavg(WEIGHTS, [updates[index] for index in order])
    assert all((got[name] == expected[name]).all() for name in WEIGHTS)


def test_weights_of_one_and_zero_are_refused_rather_than_guessed() -> None:
    with pytest.raises(UpdateError, match=r"`samples` must be > 0, got samples=0"):
        fedavg(WEIGHTS, [update("a", [1, 0]), update("b", [1, 0], samples=0)])


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({"w": np.zeros(2)}, r"differ from the global ones in \['b'\]"),
        ({"w": np.zeros(3), "b": np.zeros((1, 1))}, r"`w` must have shape \(2,\), got \(3,\)"),
        ({"w": np.array([np.nan, 0]), "b": np.zeros((1, 1))}, "`w` must be finite"),
    ],
)
def test_an_update_that_does_not_fit_names_client_and_reason(delta: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(UpdateError, match=f"'mallory': .*{message}"):
        fedavg(WEIGHTS, [Update(client="mallory", samples=1, delta=delta)])


def test_no_updates_and_two_of_one_client() -> None:
    with pytest.raises(UpdateError, match="got none"):
        fedavg(WEIGHTS, [])
    with pytest.raises(UpdateError, match="one update"):
        fedavg(WEIGHTS, [update("a", [1, 0]), update("a", [1, 0])])
