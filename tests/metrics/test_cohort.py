from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.metrics import mix_distance


def test_distance_of_the_weighted_marginals_from_the_target() -> None:
    # Marginals (1, 0) and (.25, .75), weights .4 and .6: (.55, .45), from (.5, .5): 2 * .05**2.
    assert mix_distance([0.4, 0.6], [[10, 0], [1, 3]], [2, 2]) == pytest.approx(0.005)


def test_the_pooled_mix_under_size_weights_has_no_distance_from_itself() -> None:
    counts = np.random.default_rng(0).integers(0, 9, (5, 4))
    assert mix_distance(counts.sum(axis=1) / counts.sum(), counts, counts.sum(axis=0)) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("delta", [0, 0.3, 1])
def test_the_best_weights_of_the_fedpals_synthetic_task(delta: float) -> None:
    # S1 = (.5, .5, 0), S2 = (.5, 0, .5), T = (1 - delta)(.5, .25, .25) + delta (0, .5, .5). Equal weights are best and
    # leave delta (-.5, .25, .25), squared 0.375 delta^2.
    target = (1 - delta) * np.array([0.5, 0.25, 0.25]) + delta * np.array([0, 0.5, 0.5])
    assert mix_distance([0.5, 0.5], [[20, 20, 0], [9, 0, 9]], target) == pytest.approx(0.375 * delta**2)


def test_an_empty_client_has_no_marginals() -> None:
    assert mix_distance([0.5, 0.5], [[0, 0], [3, 0]], [1, 0]) == pytest.approx(0.25)


@pytest.mark.parametrize("weights", [[1.0], [0.5, float("nan")], [1.5, -0.5], [[0.5, 0.5]]])
def test_refuses_what_are_no_weights(weights) -> None:
    with pytest.raises(ArgumentError, match="weights: must be 2 finite numbers"):
        mix_distance(weights, [[1, 2], [3, 4]], [1, 1])


def test_refuses_a_target_of_other_classes() -> None:
    with pytest.raises(ArgumentError, match="target"):
        mix_distance([1.0], [[1, 2]], [1, 1, 1])
