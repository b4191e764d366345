"""FedPALS' synthetic task."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew import data
from fedskew.errors import ArgumentError


def draw(delta: float = 0.5, seed: int = 0) -> data.Dataset:
    return data.load("synthetic", rng=np.random.default_rng(seed), delta=delta)


def test_clients_hold_exactly_the_papers_shares():
    task = draw()
    counts = [np.bincount(task.targets.numpy()[task.clients == client], minlength=3).tolist() for client in (0, 1)]
    assert counts == [[20, 20, 0], [9, 0, 9]]
    assert task.client_names == ("S1", "S2")
    assert task.in_shape == (2,)


@pytest.mark.parametrize(
    ("delta", "target"),
    [(0.0, (0.5, 0.25, 0.25)), (0.5, (0.25, 0.375, 0.375)), (1.0, (0.0, 0.5, 0.5))],
)
def test_the_target_moves_away_from_the_clients_and_the_test_part_follows_it(delta, target):
    task = draw(delta)
    np.testing.assert_allclose(task.target, target)
    assert len(task.test_targets) == 2000
    shares = np.bincount(task.test_targets, minlength=3) / 2000
    np.testing.assert_allclose(shares, target, atol=0.045)
    # squared distance from the mixes alpha (.5, .5, 0) + (1 - alpha) (.5, 0, .5) is 0.375 delta^2
    mixes = [[0.5, a / 2, (1 - a) / 2] for a in np.linspace(0, 1, 1001)]
    assert min(np.square(np.subtract(mixes, target)).sum(1)) == pytest.approx(0.375 * delta**2, abs=1e-12)


def test_classes_are_unit_gaussians_around_the_papers_means():
    tasks = [draw(0.3, seed) for seed in range(5)]
    inputs = torch.cat([task.test_inputs for task in tasks]).numpy()
    targets = torch.cat([task.test_targets for task in tasks]).numpy()
    for label, mean in enumerate([(6, 4.6), (1.2, -1.6), (4.6, -5.4)]):
        rows = inputs[targets == label]
        np.testing.assert_allclose(rows.mean(0), mean, atol=4 / len(rows) ** 0.5)
        np.testing.assert_allclose(np.cov(rows.T), np.eye(2), atol=0.08)


def test_it_depends_on_its_generator_only():
    assert torch.equal(draw(seed=3).inputs, draw(seed=3).inputs)
    assert not torch.equal(draw(seed=3).inputs, draw(seed=4).inputs)


@pytest.mark.parametrize("delta", [-0.1, 1.1, float("nan")])
def test_a_delta_outside_the_unit_interval_is_refused(delta):
    with pytest.raises(ArgumentError, match="delta:"):
        draw(delta)
    with pytest.raises(ArgumentError, match="rng:"):
        data.load("synthetic")
