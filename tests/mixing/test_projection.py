"""The projection of a target on the hull of the clients' mixes, in real and in degenerate federations."""

import numpy as np
import pytest

from fedskew.mixing import Programme

RNG = np.random.default_rng(5)
SPARSE = np.floor(RNG.dirichlet(np.full(20, 0.1), size=3000) * 300)


@pytest.mark.parametrize(
    ("counts", "target"),
    [
        (SPARSE, np.full(20, 0.05)),
        (SPARSE, np.eye(20)[3] * 0.9 + 0.005),
        (SPARSE, SPARSE[0] / SPARSE[0].sum()),
        (RNG.dirichlet(np.full(20, 5.0), size=3000), RNG.dirichlet(np.ones(20))),
        (np.tile([[2.0, 1.0, 1.0]], (9, 1)), np.array([0.2, 0.4, 0.4])),
        (np.array([[1.0]]), np.array([1.0])),
        (np.eye(6), np.full(6, 1 / 6)),
        (np.vstack([np.eye(3), np.eye(3), [[1, 1, 0]]]), np.array([0.5, 0.5, 0.0])),
    ],
    ids=["inside", "outside", "a client", "dense", "identical", "one", "vertices", "duplicates on a face"],
)
def test_nobody_can_lessen_the_distance(counts: np.ndarray, target: np.ndarray) -> None:
    found = Programme(counts, target).projection
    marginals = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    scores = marginals @ found.residual
    # Optimal exactly where every client with weight has the best score on the residual (Wolfe's criterion).
    best = scores[counts.sum(axis=1) > 0].max()
    assert best - scores[found.weights > 0].min() <= 1e-13
    assert found.weights.sum() == pytest.approx(1, abs=1e-13)
    assert found.weights.min() >= 0
    assert max(found.gap, found.kkt) <= 1e-13
    np.testing.assert_allclose(found.residual, target - found.weights @ marginals, atol=1e-13)
