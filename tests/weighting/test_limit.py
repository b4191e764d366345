"""An upper limit on a client's weight."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.mixing import limited


@pytest.mark.parametrize(
    ("weights", "limit", "sizes", "found"),
    [
        ([0.8, 0.15, 0.05], 0.5, [8, 1, 1], [0.5, 0.375, 0.125]),  # the other half, three to one
        ([0.7, 0.25, 0.05], 0.4, [8, 1, 1], [0.4, 0.4, 0.2]),  # 0.6 * 5 / 6 = 0.5 is cut too
        ([0.3, 0.3, 0.4], 0.4, [1, 1, 1], [0.3, 0.3, 0.4]),
        ([1.0, 0.0, 0.0, 0.0], 0.4, [1, 1, 1, 0], [0.4, 0.3, 0.3, 0.0]),  # nobody else has weight; one has no sample
        ([0.9, 0.1, 0.0], 0.45, [1, 1, 1], [0.45, 0.45, 0.1]),
        ([0.9, 0.1], 0.3, [1, 1], [0.5, 0.5]),  # can't hold
        ([0.9, 0.1, 0.0], 0.3, [1, 1, 0], [0.5, 0.5, 0.0]),
        ([1.0], 0.5, [1], [1.0]),
        ([1 - 1e-12, 1e-12, 0.0], 0.5, [1e12, 1, 0], [0.5, 0.5, 0.0]),
        ([0.6, 0.4], 1.0, [1, 1], [0.6, 0.4]),
    ],
)
def test_what_is_cut_goes_to_the_others_by_their_weights(weights, limit, sizes, found):
    assert limited(weights, limit, sizes) == pytest.approx(found)


def test_any_weights_end_within_the_limit_and_keep_their_order():
    rng = np.random.default_rng(0)
    for _ in range(300):
        clients = int(rng.integers(1, 12))
        weights, limit = rng.dirichlet(np.full(clients, 0.3)), float(rng.uniform(0.02, 1))
        found = limited(weights, limit, np.ones(clients))
        assert found.sum() == pytest.approx(1)
        assert found.max() <= max(limit, 1 / clients) * (1 + 1e-9)
        assert (np.diff(found[np.argsort(weights)]) >= -1e-12).all()


@pytest.mark.parametrize("limit", [0, -1, 1.5, float("nan")])
def test_a_limit_is_a_share(limit):
    with pytest.raises(ArgumentError, match="limit: must be above 0 and at most 1"):
        limited([1.0], limit, [1])
