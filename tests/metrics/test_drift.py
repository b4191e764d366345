from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.metrics import drift_diversity


def test_a_worked_example() -> None:
    # Squared norms 25 and 1 over the squared norm of the sum (3, 5): 26/34.
    updates = [[3.0, 4.0], [0.0, 1.0]]
    assert drift_diversity(updates) == pytest.approx(26 / 34)
    assert drift_diversity(torch.tensor(updates)) == pytest.approx(26 / 34)


def test_equal_updates_have_the_least_diversity() -> None:
    assert drift_diversity(np.tile([1.0, -2.0, 0.5], (5, 1))) == pytest.approx(1 / 5)
    for seed in range(20):
        updates = np.random.default_rng(seed).normal(size=(5, 3))
        assert drift_diversity(updates) >= 1 / 5


def test_orthogonal_updates_have_diversity_one() -> None:
    assert drift_diversity(3 * np.eye(4)) == pytest.approx(1)


def test_scale_does_not_matter() -> None:
    updates = np.random.default_rng(0).normal(size=(4, 7))
    assert drift_diversity(1e-8 * updates) == pytest.approx(drift_diversity(updates))


def test_with_known_norms_it_is_the_same() -> None:
    # (25 + 25) over |(7, 1)|^2
    updates = np.array([[3.0, 4.0], [4.0, -3.0]])
    assert drift_diversity(updates, [5.0, 5.0]) == pytest.approx(1) == drift_diversity(updates)
    with pytest.raises(ArgumentError, match=r"norms: expected one for each of 2 updates, got shape \(3,\)"):
        drift_diversity(updates, [1.0, 2.0, 3.0])


def test_one_client_does_not_drift() -> None:
    assert drift_diversity([[2.0, 1.0]]) == pytest.approx(1)


def test_where_nobody_moves_nobody_drifts() -> None:
    assert drift_diversity(np.zeros((4, 3))) == 1 / 4


def test_updates_that_cancel_out_have_infinite_diversity() -> None:
    assert drift_diversity([[1.0, 2.0], [-1.0, -2.0]]) == float("inf")


def test_leaves_the_updates_alone() -> None:
    updates = np.ones((2, 3))
    updates.setflags(write=False)
    drift_diversity(updates)


def test_refuses_whole_numbers() -> None:
    with pytest.raises(ArgumentError, match="updates: must be of floating point"):
        drift_diversity(torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize("updates", [np.ones(3), np.ones((0, 3)), torch.ones(2, 3, 4)])
def test_refuses_other_shapes(updates) -> None:
    with pytest.raises(ArgumentError, match=r"updates: must be \(clients, parameters\)"):
        drift_diversity(updates)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuses_updates_that_are_not_finite(value: float) -> None:
    with pytest.raises(ArgumentError, match="updates: must be finite"):
        drift_diversity([[1.0], [value]])
