"""Pairs of classes that clients hold together."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency

from fedskew.errors import ArgumentError, MissingPackageError
from fedskew.labels import (
    LabelCounts,
    colocation,
    describe,
    effective_sample_size,
    entropy,
    kl_to_uniform,
    privatize,
    projection_distance,
    site_p_value,
)
from programmes import minimum

COUNTS = LabelCounts([[300, 4, 0, 0], [0, 250, 90, 0], [7, 0, 120, 0]], ["x", "y", "z"], ["cat", "dog", "fox", "owl"])


def test_colocation_client_by_client() -> None:
    counts = np.random.default_rng(0).integers(0, 4, (70, 9)) * np.random.default_rng(1).integers(0, 2, (70, 9))
    expected = sum(np.minimum(row[:, None], row[None, :]) for row in counts)
    np.testing.assert_array_equal(colocation(counts), expected)


def test_colocation_of_wrong_counts_is_refused() -> None:
    with pytest.raises(ArgumentError, match="counts"):
        colocation([1, 2, 3])


def test_pairs_that_nobody_can_tell_apart_are_counted_and_named() -> None:
    report = describe(COUNTS)
    assert report.pairs.number == 3  # no owl anywhere
    assert report.pairs.under(10).tolist() == [[0, 1], [0, 2]]
    assert report.pairs.under(100).tolist() == [[0, 1], [0, 2], [1, 2]]
    (found,) = (text for text in report.sentences() if "told apart" in text)
    assert "2 of 3 pairs of classes have under 10 samples together" in found
    assert "3 under 100: cat and dog; cat and fox." in found
    assert "2 of 3 by under 10 samples, 3 by under 100" in str(report)
    plain = json.loads(json.dumps(report.to_dict()))["class_pairs"]
    assert (plain["pairs"], plain["under_10"], plain["under_100"]) == (3, 2, 3)
    assert plain["fewest"][0] == {"classes": ["cat", "dog"], "together": 4.0}


def test_nothing_is_said_of_pairs_where_all_are_held_together_or_there_is_one_client() -> None:
    assert "told apart" not in str(describe(np.full((5, 4), 30)))
    assert "told apart" not in str(describe([[300, 1]]))


def test_classes_of_a_target_that_nobody_holds_are_named_with_the_ceiling() -> None:
    target = [0.25, 0.25, 0.0, 0.5]
    report = describe(COUNTS, target)
    assert report.target is not None
    assert report.target.unheld.tolist() == [3]
    assert report.target.ceiling == 0.5
    text = "No client holds class owl, 50% of the target: no method learns what nobody has, so expect at most 50.0%"
    assert any(sentence.startswith(text) for sentence in report.sentences())
    plain = report.to_dict()["target"]
    assert (plain["unheld"], plain["ceiling"]) == (["owl"], 0.5)
    assert "No client holds class owl, 50%" not in str(describe(COUNTS, [1, 1, 1, 0]))


# Whether one site's samples of a class look like the others'.

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


# Private release: the noise's scale, clamping, and where the noise comes from.

HIGH = np.full((200, 200), 1e6)
"""Far from 0, so that clamping touches nothing."""


@pytest.mark.parametrize(("neighbours", "sensitivity"), [("add-remove", 1), ("replace", 2)])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_seeded_noise_is_laplace_of_scale_sensitivity_over_epsilon(
    neighbours: str, sensitivity: int, epsilon: float
) -> None:
    noise = privatize(HIGH, epsilon, np.random.default_rng(1), neighbours) - HIGH
    scale = sensitivity / epsilon
    # Of Laplace(b): mean 0, E|x| = b with standard deviation b, P(|x| > 2b) = exp(-2); 40,000 draws, five deviations.
    assert noise.mean() == pytest.approx(0, abs=5 * np.sqrt(2) * scale / 200)
    assert np.abs(noise).mean() == pytest.approx(scale, rel=5 / 200)
    assert (np.abs(noise) > 2 * scale).mean() == pytest.approx(np.exp(-2), abs=5 * 0.342 / 200)


@pytest.mark.parametrize(("neighbours", "scale"), [("add-remove", 2.0), ("replace", 4.0)])
def test_secure_noise_has_the_same_scale(neighbours: str, scale: float) -> None:
    pytest.importorskip("opendp")
    noise = privatize(HIGH[:60, :60], 0.5, neighbours=neighbours) - 1e6
    # 3,600 draws; eight deviations, since the secure generator takes no seed.
    assert np.abs(noise).mean() == pytest.approx(scale, rel=8 / 60)
    assert noise.mean() == pytest.approx(0, abs=8 * np.sqrt(2) * scale / 60)


def test_noise_is_clamped_at_zero_and_not_rounded() -> None:
    noisy = privatize(np.zeros((100, 100)), 0.5, np.random.default_rng(0))
    assert noisy.min() == 0
    assert (noisy == 0).mean() == pytest.approx(0.5, abs=0.03)
    assert not np.array_equal(noisy, np.round(noisy))


def test_a_seed_gives_the_same_noise_and_none_gives_other_noise() -> None:
    counts = np.full((3, 4), 50.0)
    first, again = (privatize(counts, 1.0, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first, again)
    pytest.importorskip("opendp")
    assert not np.array_equal(privatize(counts, 1.0), privatize(counts, 1.0))


def test_a_record_keeps_its_names() -> None:
    record = LabelCounts([[5, 0], [1, 2]], ["a", "b"], ["x", "y"])
    noisy = privatize(record, 1.0, np.random.default_rng(0))
    assert isinstance(noisy, LabelCounts)
    assert (noisy.clients, noisy.classes) == (("a", "b"), ("x", "y"))
    assert isinstance(privatize([[5, 0]], 1.0, np.random.default_rng(0)), np.ndarray)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": np.inf}, "epsilon"),
        ({"epsilon": np.nan}, "epsilon"),
        ({"epsilon": "1"}, "epsilon"),
        ({"epsilon": 1, "neighbours": "add"}, "neighbours"),
        ({"epsilon": 1, "rng": 3}, "rng"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: "):
        privatize([[1, 2]], **arguments)


def test_without_opendp_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp", None)
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'fedskew\[dp\]'"):
        privatize([[1, 2]], 1.0)
    privatize([[1, 2]], 1.0, np.random.default_rng(0))


# Entropy, divergence, effective sample size, and the distance to the hull.

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
