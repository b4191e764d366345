"""Whether one site's samples of a class look like the others'."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import chi2, chi2_contingency

from fedskew.errors import ArgumentError
from fedskew.labels import site_p_value

OWN = np.array([[30, 10], [10, 30]])
OTHERS = np.array([[40, 20], [30, 90]])


def test_the_p_value_is_that_of_scipys_contingency_tables_added_up():
    found = [chi2_contingency([own, rest], correction=False) for own, rest in zip(OWN, OTHERS, strict=True)]
    expected = chi2.sf(sum(one.statistic for one in found), sum(one.dof for one in found))
    assert site_p_value(OWN, OWN + OTHERS) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(0.6725, abs=1e-4)


def test_cells_in_which_few_are_expected_are_joined():
    # Of 20 and 80 samples: a fifth of 60, 30, 5, 5 are expected here, 12, 6, 1, 1; the last two join the second.
    own, others = np.array([[10, 8, 1, 1]]), np.array([[50, 22, 4, 4]])
    expected = chi2_contingency([[10, 10], [50, 30]], correction=False).pvalue
    assert site_p_value(own, own + others) == pytest.approx(expected, rel=1e-12)


def test_another_label_mix_is_no_difference():
    profile = np.array([[60, 30, 10], [10, 20, 70]])
    assert site_p_value(profile * [[5], [1]], profile * [[6], [20]]) == pytest.approx(1.0)


def test_a_site_like_the_others_is_rejected_about_as_often_as_said():
    rng = np.random.default_rng(0)
    profiles = rng.dirichlet(np.full(12, 0.4), size=4)
    sizes = [rng.integers(0, 60, size=4) for _ in range(300)]
    others = np.array([rng.multinomial(400, row) for row in profiles])
    found = []
    for held in sizes:
        own = np.array([rng.multinomial(number, row) for number, row in zip(held, profiles, strict=True)])
        found.append(site_p_value(own, own + others))
    assert 0.02 <= np.mean(np.array(found) < 0.05) <= 0.09


@pytest.mark.parametrize("own", [np.zeros((2, 2)), [[1, 0], [0, 1]]])
def test_too_few_samples_say_nothing(own):
    assert math.isnan(site_p_value(own, own + OTHERS))


def test_the_only_site_can_not_be_compared():
    assert math.isnan(site_p_value(OWN, OWN))


@pytest.mark.parametrize(
    ("own", "pooled", "says"),
    [
        (OWN, OWN[:1], r"own: must have the shape of pooled, \(1, 2\), not \(2, 2\)"),
        (OTHERS, OWN, "own: has more samples than pooled"),
        ([1, 2], [1, 2], r"own: must have the shape \(classes, cells\), not \(2,\)"),
        ([[math.nan, 1]], [[1, 1]], "own: every number must be finite"),
    ],
)
def test_what_does_not_fit_is_refused(own, pooled, says):
    with pytest.raises(ArgumentError, match=says):
        site_p_value(own, pooled)
