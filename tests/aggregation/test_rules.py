"""Every rule against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from fedskew.aggregation import INDEX, Mean

GeometricMedian, Krum, Median, NormClipping, TrimmedMean = (
    INDEX[name] for name in ("geometric_median", "krum", "median", "norm_clipping", "trimmed_mean")
)
LIAR = 1e30


def total(rule, updates, weights=None) -> np.ndarray:
    """The change of the model: the weighted sum of what the rule returns."""
    rows = torch.tensor(updates, dtype=torch.float64)
    given = np.full(len(rows), 1 / len(rows)) if weights is None else np.array(weights)
    before = rows.clone(), given.copy()
    combined, shares = rule.combine(rows, given)
    assert torch.equal(rows, before[0])
    assert (given == before[1]).all()
    assert shares.sum() == pytest.approx(1)
    return (torch.from_numpy(shares) @ combined).numpy()


KRUM, KRUM_WEIGHTS = (0, 1, 1.5, 3, 100), (0.1, 0.2, 0.3, 0.1, 0.3)


@pytest.mark.parametrize(
    ("rule", "values", "weights", "expected"),
    [
        (Median(), (1, 2, 10), (0.2, 0.4, 0.4), 2),
        (Median(), (10, 1, 2), (0.4, 0.2, 0.4), 2),  # whatever the order
        (Median(), (1, 2, 10), (0.2, 0.3, 0.5), 6),  # exactly half below: the mean of both
        (Median(), (1, 2, 10), (0.2, 0.2, 0.6), 10),
        (Median(), (5,), (1.0,), 5),
        (Median(), (3, 9, 4, 8), None, 6),
        (Median(), (3, 9, 4, 8, LIAR), None, 8),
        (Median(), (1, 2, LIAR), (0.5, 0.5, 0.0), 1.5),  # no weight, no say
        (TrimmedMean(0.25), (100, 0, 8, 4), None, 6),
        # On a line: 1 on [0, .1], 2 on [.1, .3], 3 on [.3, .7], 100 on [.7, 1]; what lies in [.25, .75] is
        # .05 * 2 + .4 * 3 + .05 * 100 = 6.3, over .5.
        (TrimmedMean(0.25), (1, 2, 3, 100), (0.1, 0.2, 0.4, 0.3), 12.6),
        (TrimmedMean(0.0), (1, 2, 6), None, 3),
        (TrimmedMean(0.2), (7,), (1.0,), 7),
        (TrimmedMean(0.2), (-LIAR, 1, 2, 3, LIAR), None, 2),
        # n = 5, f = 1, so two neighbours each: 0: 1 + 2.25, 1: 0.25 + 1, 1.5: 0.25 + 2.25, 3: 2.25 + 4, 100: far.
        (Krum(), KRUM, KRUM_WEIGHTS, 1),
        (Krum(keep=2), KRUM, KRUM_WEIGHTS, (0.2 * 1 + 0.3 * 1.5) / 0.5),
        (Krum(keep=9), KRUM, KRUM_WEIGHTS, (0.2 + 0.3 * 1.5 + 0.1 * 3) / 0.7),  # all but one
        (Krum(keep=2), KRUM, (0.5, 0, 0, 0.5, 0), 1.25),  # no weight at all: equally
        (Krum(), (0, 1, 1.5, 3, LIAR), None, 1),
    ],
)
def test_rules_of_numbers_by_hand(rule, values, weights, expected):
    assert total(rule, [[value] for value in values], weights) == pytest.approx([expected])
    assert (Krum().least, Krum(malicious=3).least) == (5, 9)


@pytest.mark.parametrize(
    ("points", "weights", "median"),
    [
        ([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]], None, [0.5, math.sqrt(3) / 6]),  # equal sides: the centre
        ([[0, 0], [4, 0], [3, 3], [0, 2]], None, [4 / 3, 4 / 3]),  # a convex quadrilateral: where its diagonals cross
        ([[1, 5], [4, 0], [3, 3]], [0.6, 0.2, 0.2], [1, 5]),  # more than half of the weight
        ([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2], [LIAR, 0]], [0.3, 0.3, 0.3, 0.1], None),
        ([[2, 2]], None, [2, 2]),
        ([[0, 0], [0, 0]], None, [0, 0]),
    ],
)
def test_the_weighted_geometric_median(points, weights, median):
    found = total(GeometricMedian(), points, weights)
    if median is None:  # it stays among the honest, pulled towards the liar no more than by its weight
        assert np.linalg.norm(found - [0.5, math.sqrt(3) / 6]) < 0.2
    else:
        assert found == pytest.approx(median, abs=1e-5)


def test_clipping_keeps_directions_and_bounds_lengths():
    updates = [[3, 4], [0, 1], [0, 0], [-6, 8]]  # norms 5, 1, 0, 10; the client without a step is left out
    assert total(NormClipping(), updates) == pytest.approx([(3 - 3) / 4, (4 + 1 + 4) / 4])
    assert total(NormClipping(bound=2.5), updates) == pytest.approx([(1.5 - 1.5) / 4, (2 + 1 + 2) / 4])
    assert total(NormClipping(quantile=0.0, bound=2.5), updates) == pytest.approx([0, (0.8 + 1 + 0.8) / 4])
    assert total(NormClipping(), [[LIAR], [1.0]]) == pytest.approx([1])  # of two, the shorter one is the bound
    long = torch.ones(2, 3)
    assert NormClipping(bound=100).combine(long, np.full(2, 0.5))[0] is long


def test_buffers_are_clipped_by_their_own_lengths_and_not_by_the_bound_of_parameters():
    changes = torch.tensor([[30.0], [40.0], [LIAR]])
    clipped, _ = NormClipping(bound=0.1).combine_buffers(changes, np.full(3, 1 / 3))
    assert clipped.flatten().tolist() == pytest.approx([30, 40, 40])


def test_the_mean_costs_nothing():
    updates, weights = torch.ones(2, 3), np.array([0.5, 0.5])
    combined = Mean().combine(updates, weights)
    assert (combined[0] is updates, combined[1] is weights) == (True, True)


@pytest.mark.parametrize("name", INDEX)
def test_wide_models_are_taken_part_by_part(name):
    rng = np.random.default_rng(0)
    updates = torch.from_numpy(rng.normal(size=(7, 70_000)))  # more than one part
    parts, shares = INDEX[name]().combine(updates, np.full(7, 1 / 7))
    if name in ("median", "trimmed_mean"):
        kept = np.sort(updates.numpy(), axis=0)
        middle = kept[3] if name == "median" else (kept[2:5].sum(axis=0) + 0.6 * (kept[1] + kept[5])) / 4.2
        np.testing.assert_allclose(parts[0].numpy(), middle, atol=1e-12)
    else:
        assert parts.shape == updates.shape
        assert shares.sum() == pytest.approx(1)
