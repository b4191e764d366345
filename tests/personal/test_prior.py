"""The personal model that takes a client's label mix: by hand, and against Bayes' rule where that is known."""

import numpy as np
import pytest
from scipy.special import softmax

from fedskew.errors import ArgumentError
from fedskew.labels import NEVER, Calibration, calibrate, personal
from fedskew.personal import INDEX, HeldOut

Prior = INDEX["prior"]
MEANS = np.array([[0.0, 0.0], [1.5, 0.0], [0.5, 1.2]])
HELD_OUT, OWN = np.array([0.2, 0.3, 0.5]), np.array([0.75, 0.0, 0.25])


def mixture(mix: np.ndarray, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the densities of three normal distributions at samples of a mixture, up to a constant; labels."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(3, samples, p=mix)
    points = MEANS[labels] + rng.normal(size=(samples, 2))
    return -0.5 * ((points[:, None] - MEANS) ** 2).sum(axis=2), labels


def test_three_classes_by_hand() -> None:
    # q = (3.5, 0.5, 1.5) / 5.5, r = (1/2, 1/4, 1/4): q/r = (14, 4, 12) / 11; exp(z/2 + b) = (1, 3, 2).
    logits = [[0.0, 2 * np.log(3), 2 * np.log(4)]]
    calibration = Calibration(2.0, np.log([1.0, 1.0, 0.5]))
    expected = np.array([14.0, 12.0, 24.0]) / 50
    np.testing.assert_allclose(personal(logits, calibration, [2, 1, 1], [3, 0, 1]), [expected], rtol=1e-12)
    moved = Prior().moved(logits, HeldOut(calibration, np.array([0.5, 0.25, 0.25])), [3, 0, 1])
    np.testing.assert_allclose(softmax(moved, axis=1), [expected], rtol=1e-12)


def test_a_client_without_samples_has_the_model_without_a_prior() -> None:
    calibration, logits = Calibration(0.5, np.array([0.1, -0.1])), [[1.0, 2.0]]
    np.testing.assert_allclose(personal(logits, calibration, [0.5, 0.5], [0, 0]), calibration.apply(logits))


def test_of_two_clients_the_logits_differ_by_their_mixes_alone() -> None:
    calibration, logits = Calibration(3.0, np.zeros(3)), np.random.default_rng(0).normal(size=(5, 3))
    one, other = (np.log(personal(logits, calibration, HELD_OUT, counts)) for counts in ([9, 4, 1], [1, 1, 7]))
    apart = one - other - np.log(np.array([9.5, 4.5, 1.5]) / np.array([1.5, 1.5, 7.5]))
    np.testing.assert_allclose(apart, np.broadcast_to(apart[:, :1], apart.shape), atol=1e-12)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("mix", ["counts", "estimate"])
def test_it_is_as_often_right_as_bayes_rule(mix: str, balanced: bool) -> None:
    # Logits that are too sure and prefer a class: log densities times 3, and something added.
    held, labels = mixture(HELD_OUT, 20_000, 1)
    skewed = np.array([0.0, 4.0, -2.0])
    told = HeldOut.of(3 * held + skewed, labels)
    if balanced:
        told = HeldOut(calibrate(3 * held + skewed, labels), np.full(3, 1 / 3), told.tables)
    theirs, truth = mixture(OWN, 100_000, 2)
    bayes = np.argmax(theirs + np.log(np.maximum(OWN, 1e-300)), axis=1) == truth
    moved = Prior(mix).moved(3 * theirs + skewed, told, 1000 * OWN)
    assert np.mean(moved.argmax(axis=1) == truth) == pytest.approx(bayes.mean(), abs=0.002)
    assert np.mean((3 * theirs + skewed).argmax(axis=1) == truth) < bayes.mean() - 0.1


def test_an_estimate_follows_a_mix_that_counts_do_not_know() -> None:
    held, labels = mixture(HELD_OUT, 5000, 3)
    now, truth = mixture(np.array([0.05, 0.9, 0.05]), 2000, 4)
    told, before = HeldOut.of(held, labels), [900, 50, 50]
    right = {
        mix: np.mean(Prior(mix).moved(now, told, before).argmax(axis=1) == truth) for mix in ("counts", "estimate")
    }
    assert right["estimate"] > right["counts"] + 0.3
    few = now[:10]  # say too little of a mix
    np.testing.assert_array_equal(Prior("estimate").moved(few, told, before), Prior().moved(few, told, before))
    assert Prior("estimate").moved(now[:0], told, before).shape == (0, 3)


def test_a_class_without_a_held_out_sample_is_never_predicted() -> None:
    logits, labels = np.random.default_rng(5).normal(size=(50, 3)), np.arange(50) % 2
    told = HeldOut.of(logits, labels)
    assert told.mix.tolist() == [0.5, 0.5, 0]
    moved = Prior().moved(logits, told, [1, 1, 98])
    assert (moved[:, 2] == NEVER).all()
    assert np.isfinite(moved).all()
    assert not personal(logits, told.calibration, told.mix, [1, 1, 98])[:, 2].any()
    assert not personal(logits, Calibration(1.0, np.zeros(3)), [0.5, 0.5, 0], [1, 1, 98])[:, 2].any()


def test_logits_that_say_nothing_leave_the_clients_mix() -> None:
    told = personal([[5.0, -5.0]], Calibration(np.inf, np.zeros(2)), [0.5, 0.5], [2, 0])
    np.testing.assert_allclose(told, [[2.5 / 3, 0.5 / 3]])


@pytest.mark.parametrize(
    ("held_out_mix", "counts", "message"),
    [
        ([0.5, 0.5], [1, -1], r"^counts: .* counts\[1\] is -1"),
        ([0.5, 0.5], [1, np.nan], r"^counts: .* counts\[1\] is nan"),
        ([0.5, 0.5], [1, 1, 1], r"^counts: must have the shape \(2,\), one number for each class, not \(3,\)"),
        ([0.5, 0.5], [[1, 1]], r"^counts: must have the shape \(2,\)"),
        ([0, 0], [1, 1], r"^held_out_mix: its shares must have a positive sum"),
        ([1], [1, 1], r"^held_out_mix: must have the shape \(2,\)"),
    ],
)
def test_mistakes_are_named(held_out_mix, counts, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        personal([[0.0, 0.0]], Calibration(1.0, np.zeros(2)), held_out_mix, counts)
    with pytest.raises(ArgumentError, match=r"^logits: must have 2 columns"):
        personal([[0.0]], Calibration(1.0, np.zeros(2)), [0.5, 0.5], [1, 1])


def test_an_estimate_needs_the_held_out_samples_by_outcome() -> None:
    with pytest.raises(ArgumentError, match="^tables: "):
        Prior("estimate").moved([[0.0, 0.0]], HeldOut(Calibration(1.0, np.zeros(2)), np.array([0.5, 0.5])), [1, 1])
    with pytest.raises(ArgumentError, match="mix"):
        Prior("guess")


def test_a_class_that_a_finish_ruled_out_is_left_out_of_the_calibration() -> None:
    held, labels = mixture(HELD_OUT, 2000, 6)
    ruled_out = held + np.array([0.0, 0.0, NEVER])
    told, without = HeldOut.of(ruled_out, labels), HeldOut.of(held[labels < 2], labels[labels < 2])
    assert told.mix[2] == 0
    np.testing.assert_allclose(told.mix, without.mix)
    assert (Prior().moved(ruled_out, told, [5, 1, 9]).argmax(axis=1) < 2).all()
    by_pair = calibrate(held[labels < 2][:, :2], labels[labels < 2], np.ones(np.sum(labels < 2)))
    assert told.calibration.temperature == pytest.approx(by_pair.temperature, rel=1e-6)
