"""Entropy, divergence, effective sample size, and the distance to the hull."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts, effective_sample_size, entropy, kl_to_uniform, projection_distance
from programmes import minimum

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def test_entropy_in_bits_by_hand() -> None:
    # 1/2, 1/4, 1/8, 1/8: 0.5 + 0.5 + 0.375 + 0.375
    assert entropy([4, 2, 1, 1]) == pytest.approx(1.75, abs=1e-15)
    assert isinstance(entropy([4, 2, 1, 1]), float)
    assert entropy([7, 0, 0]) == 0
    assert entropy([0, 0, 0]) == 0
    np.testing.assert_allclose(entropy([[1, 1, 0], [0, 0, 0], [5, 5, 5]]), [1, 0, math.log2(3)])


def test_divergence_from_uniform_is_what_entropy_lacks() -> None:
    assert kl_to_uniform([4, 2, 1, 1]) == pytest.approx(0.25, abs=1e-15)
    assert kl_to_uniform([3, 3]) == 0
    assert kl_to_uniform(LabelCounts([[0, 0, 0, 0], [9, 0, 0, 0]])).tolist() == [2, 2]
    assert kl_to_uniform([5]) == 0


@pytest.mark.parametrize("counts", [[1, -1], [np.nan, 1], [], 3, np.ones((2, 2, 2))])
def test_entropy_refuses_what_is_no_counts(counts: object) -> None:
    for measure in (entropy, kl_to_uniform):
        with pytest.raises(ArgumentError, match="counts: "):
            measure(counts)


def test_effective_sample_size_by_hand() -> None:
    # 1 / (0.25 / 10 + 0.25 / 30)
    assert effective_sample_size([0.5, 0.5], [10, 30]) == pytest.approx(30)
    assert effective_sample_size([0.25, 0.75], [10, 30]) == pytest.approx(40)
    assert effective_sample_size([1, 0], [10, 0]) == pytest.approx(10)
    assert effective_sample_size([0.5, 0.5], [10, 0]) == pytest.approx(40)
    assert effective_sample_size([0, 0], [10, 3]) == 0


@pytest.mark.parametrize(
    ("weights", "sizes", "name"),
    [
        ([0.5, 0.5], [1], "sizes"),
        ([[1.0]], [1], "weights"),
        ([], [], "weights"),
        ([1.5, -0.5], [1, 1], "weights"),
        ([np.nan, 1], [1, 1], "weights"),
        ([0.5, 0.5], [1, -1], "sizes"),
    ],
)
def test_effective_sample_size_refuses_by_name(weights: object, sizes: object, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        effective_sample_size(weights, sizes)


@pytest.mark.parametrize("delta", [0, 0.1, 0.25, 0.5, 0.75, 1])
def test_the_synthetic_task_lies_three_eighths_of_delta_squared_away(delta: float) -> None:
    # S1 = (.5, .5, 0), S2 = (.5, 0, .5), T = (1 - delta) (.5, .25, .25) + delta (0, .5, .5): by symmetry the nearest
    # mix is (.5, .25, .25), and T differs from it by delta (-1/2, 1/4, 1/4), whose square is 3/8 delta^2.
    target = (1 - delta) * np.array([0.5, 0.25, 0.25]) + delta * np.array([0, 0.5, 0.5])
    assert projection_distance([[20, 20, 0], [9, 0, 9]], target) == pytest.approx(0.375 * delta**2, abs=1e-15)


def test_distance_is_zero_inside_the_hull_and_on_it() -> None:
    counts = [[10, 0, 0], [0, 5, 0], [0, 0, 1]]
    for target in ([1, 1, 1], [0, 1, 1], [0, 0, 1], [5, 1, 0]):
        assert projection_distance(counts, target) <= 1e-28


def test_distance_ignores_sizes_scale_and_empty_clients() -> None:
    counts = np.array([[3, 1, 0], [1, 0, 5]])
    grown = np.vstack([1000 * counts[:1], counts[1:], np.zeros((1, 3))])
    target = [0.1, 0.8, 0.1]
    assert projection_distance(grown, 7 * np.array(target)) == pytest.approx(
        projection_distance(counts, target), abs=1e-15
    )


def test_distance_needs_a_client_with_samples_and_a_fitting_target() -> None:
    with pytest.raises(ArgumentError, match="counts: no client holds a sample"):
        projection_distance(np.zeros((2, 3)), [1, 1, 1])
    with pytest.raises(ArgumentError, match="target: must have the shape"):
        projection_distance(np.ones((2, 3)), [1, 1])


def distance_by_general_solver(counts: np.ndarray, target: np.ndarray) -> float:
    """The same distance from clarabel, an interior point solver for general programmes."""
    marginals = counts[counts.sum(axis=1) > 0]
    marginals = marginals / marginals.sum(axis=1, keepdims=True)
    missing = target - minimum(2 * marginals @ marginals.T, -2 * marginals @ target) @ marginals
    return float(missing @ missing)


@pytest.mark.slow
@QUICK
@given(st.integers(0, 10**6))
def test_distance_agrees_with_a_general_solver(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients, classes = rng.integers(1, 15), rng.integers(2, 8)
    counts = rng.integers(0, 4, (clients, classes)) * 10.0 ** rng.integers(0, 5, (clients, 1))
    counts[0] += 1
    target = rng.dirichlet(np.full(classes, 0.5))
    judged = distance_by_general_solver(counts, target)
    assert projection_distance(counts, target) == pytest.approx(judged, abs=1e-8)
