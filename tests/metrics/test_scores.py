"""Figures of probabilities, thresholds and intervals: scikit-learn's, by hand, and at their edges."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from fedskew.engine import Evaluation
from fedskew.errors import ArgumentError
from fedskew.metrics import Scores

RNG = np.random.default_rng(0)


def drawn(samples: int, classes: int, share: float = 0.5, seed: int = 0) -> Scores:
    """Samples of which the first class has a share, with logits that know something."""
    rng = np.random.default_rng(seed)
    rest = (1 - share) / (classes - 1)
    labels = rng.choice(classes, samples, p=[share, *[rest] * (classes - 1)])
    return Scores.of(rng.normal(size=(samples, classes)) + 1.2 * np.eye(classes)[labels], labels)


@pytest.mark.parametrize("classes", [2, 4])
def test_each_class_has_scikit_learns_rankings(classes):
    scores = drawn(200, classes, 0.9)
    found = scores.figures()
    for label in range(classes):
        of_class, probability = scores.labels == label, scores.probabilities[:, label]
        assert found["per_class_auroc"][label] == pytest.approx(sk.roc_auc_score(of_class, probability), abs=1e-12)
        assert found["per_class_pr_auc"][label] == pytest.approx(
            sk.average_precision_score(of_class, probability), abs=1e-12
        )
    assert found["auroc"] == pytest.approx(np.mean(found["per_class_auroc"]))
    predicted = scores.logits.argmax(axis=1)
    assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(scores.labels, predicted))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(scores.labels, predicted, average="macro"))


def test_reliability_is_scikit_learns_calibration_curve():
    scores = drawn(500, 3)
    samples, right, confidence = np.array(scores.figures()["reliability"]).T
    some = samples > 0
    shares, means = calibration_curve(
        scores.logits.argmax(axis=1) == scores.labels, scores.probabilities.max(axis=1), n_bins=15
    )
    assert samples.sum() == 500
    assert right[some] / samples[some] == pytest.approx(shares)
    assert confidence[some] / samples[some] == pytest.approx(means)
    assert scores.figures()["ece"] == pytest.approx(np.abs(right - confidence).sum() / 500)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_rankings_of_findings_with_ties(pairs):
    score, positive = np.array([one / 4 for one, _ in pairs]), np.array([hit for _, hit in pairs])
    (auroc,), (pr_auc,) = Scores.rankings(score[:, None], positive[:, None])
    if positive.all() or not positive.any():
        assert math.isnan(auroc)
        assert math.isnan(pr_auc)
    else:
        assert auroc == pytest.approx(sk.roc_auc_score(positive, score), abs=1e-12)
        assert pr_auc == pytest.approx(sk.average_precision_score(positive, score), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "positive"), [([[1.5]], [[True]]), ([[math.nan]], [[True]]), ([0.5], [True]), ([[0.5]], [[True, False]])]
)
def test_scores_that_are_no_probabilities_are_refused(scores, positive):
    with pytest.raises(ArgumentError, match="^probabilities: must be"):
        Scores.rankings(scores, positive)


def test_a_threshold_by_hand():
    probabilities = np.array([0.05, 0.1, 0.2, 0.3, 0.35, 0.6])
    labels = [0, 0, 1, 0, 1, 1]
    scores = Scores.of(np.log(np.stack([1 - probabilities, probabilities], axis=1)), labels)
    # From .35 on: recalls 1 and 2/3; from .2 on: 2/3 and 1. Of equal ones the nearest to 0.5 counts: (.3 + .35) / 2.
    assert scores.threshold("balanced_accuracy") == pytest.approx(0.325)
    assert scores.threshold("accuracy") == pytest.approx(0.325)
    assert scores.confusion(0.325).tolist() == [[3, 0], [1, 2]]
    assert scores.confusion().tolist() == [[3, 0], [2, 1]]


@pytest.mark.parametrize("figure", ["accuracy", "balanced_accuracy", "macro_f1"])
def test_no_threshold_is_better_on_the_samples_that_chose_it(figure):
    scores = drawn(150, 2, 0.85, seed=3)
    chosen = scores.threshold(figure)
    assert chosen is not None

    def at(threshold: float) -> float:
        return float(getattr(Evaluation.of(scores.confusion(threshold), 0.0, None), figure))

    values = np.unique(scores.probabilities[:, 1])
    assert at(chosen) == pytest.approx(max(at(threshold) for threshold in values))


def test_other_than_two_classes_with_samples_have_no_threshold():
    assert drawn(20, 3).threshold() is None
    assert Scores.of(np.zeros((3, 2)), [1, 1, 1]).threshold() is None
    assert Scores.of([[math.nan, 0.0], [0.0, 0.0]], [0, 1]).threshold() is None


def test_intervals_are_those_of_samples_drawn_again_one_by_one():
    scores = drawn(300, 2, 0.8, seed=1)
    target = np.array([0.3, 0.7])
    found = Scores.intervals(scores.confusion(), np.random.default_rng(0), scores, target)
    rng, plain = np.random.default_rng(1), []
    for _ in range(1500):
        rows = rng.integers(300, size=300)
        again = Scores.of(scores.logits[rows], scores.labels[rows])
        own = again.figures() | {"target_accuracy": Evaluation.of(again.confusion(), 0.0, target).target_accuracy}
        plain.append([own[name] for name in found])
    assert set(found) == {
        *("accuracy", "balanced_accuracy", "macro_f1", "target_accuracy"),
        *("auroc", "pr_auc", "ece", "loss"),
    }
    for (name, ends), low, high in zip(found.items(), *np.quantile(plain, [0.025, 0.975], axis=0), strict=True):
        width = high - low
        assert ends == pytest.approx([low, high], abs=0.15 * width), name


def test_intervals_of_sums_alone_and_of_nothing():
    rng = np.random.default_rng(0)
    assert set(Scores.intervals(np.array([[3, 1], [0, 4]]), rng)) == {"accuracy", "balanced_accuracy", "macro_f1"}
    assert Scores.intervals(np.zeros((2, 2), dtype=np.int64), rng) == {}
    one = Scores.of([[2.0, 0.0]] * 3, [0, 0, 0])
    assert not {"auroc", "pr_auc"} & set(Scores.intervals(one.confusion(), rng, one))
    assert "auroc" not in Scores.intervals(
        np.array([[1, 0], [0, 1]]), rng, Scores.of([[math.inf, 0.0], [0.0, 1.0]], [0, 1])
    )


@pytest.mark.parametrize(
    ("samples", "target", "measure"),
    [
        ([61, 39], None, "balanced_accuracy"),
        ([60, 40], None, "accuracy"),
        ([40, 35, 25], None, "accuracy"),
        ([51, 29, 20], None, "balanced_accuracy"),  # one and a half times an even share
        ([90, 10], [0.5, 0.5], "target_accuracy"),
        ([5, 0], None, "accuracy"),  # one class alone
    ],
)
def test_the_measure_follows_the_classes_shares(samples, target, measure):
    evaluation = Evaluation.of(np.diag(samples), 0.1, None if target is None else np.array(target))
    assert evaluation.measure("auto") == measure
    assert evaluation.measure("auroc") == "auroc"
    assert evaluation.majority == pytest.approx(max(samples) / sum(samples))
    assert evaluation.judged("auroc") == -1  # it is not known


def test_of_the_calibration_error_the_lowest_is_best():
    good, bad = (Evaluation.of(np.eye(2, dtype=np.int64), 0.1, None) for _ in range(2))
    good.ece, bad.ece = 0.02, 0.3
    assert good.judged("ece") > bad.judged("ece") > -1
