"""Figures at clients, and what sites count: scikit-learn's definitions, undefined ones, scores in bins, lies."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, roc_auc_score

from common import as_bits
from fedskew.engine import Evaluation
from fedskew.errors import FedskewError
from fedskew.metrics import Scores, SiteRow, Tally, finding_figures


def row_of(logits, labels) -> SiteRow:
    (row,) = SiteRow.of("common", [np.asarray(labels)], lambda client: logits)
    return row


@pytest.mark.parametrize("rounded", [False, True], ids=["no ties", "ties"])
@pytest.mark.parametrize(("classes", "held"), [(2, 2), (5, 5), (6, 3)], ids=["binary", "all classes", "three of six"])
def test_figures_are_those_of_scikit_learn(classes, held, rounded):
    rng = np.random.default_rng(classes + 10 * held)
    labels = rng.integers(held, size=90)
    logits = rng.normal(size=(90, classes)) + 1.5 * np.eye(classes)[labels]
    logits = np.round(logits) if rounded else logits
    row = row_of(logits, labels)

    probabilities = np.exp(torch.log_softmax(torch.from_numpy(logits), dim=1).numpy())  # the same ties
    predicted, present = logits.argmax(axis=1), np.unique(labels)
    one_vs_rest = [(labels == own, probabilities[:, own]) for own in present]
    assert row.samples == 90
    assert row.accuracy == pytest.approx(sk.accuracy_score(labels, predicted))
    assert row.balanced_accuracy == pytest.approx(sk.recall_score(labels, predicted, labels=present, average="macro"))
    f1 = sk.f1_score(labels, predicted, labels=present, average="macro", zero_division=0)
    assert row.macro_f1 == pytest.approx(f1)
    assert row.auroc == pytest.approx(np.mean([sk.roc_auc_score(y, p) for y, p in one_vs_rest]), abs=1e-12)
    assert row.pr_auc == pytest.approx(np.mean([sk.average_precision_score(y, p) for y, p in one_vs_rest]), abs=1e-12)
    assert row.loss == pytest.approx(sk.log_loss(labels, probabilities, labels=range(classes)))
    confidence, right = probabilities.max(axis=1), predicted == labels
    shares, means = calibration_curve(right, confidence, n_bins=15, strategy="uniform")
    sizes = np.histogram(np.ceil(confidence * 15), bins=np.arange(0.5, 16))[0]
    assert row.ece == pytest.approx(np.abs(shares - means) @ sizes[sizes > 0] / 90)


def test_a_client_of_one_class_has_no_ranking_and_a_client_without_samples_no_row():
    tests = [np.array([1, 1, 1]), np.array([], dtype=np.int64), np.array([0])]
    rows = SiteRow.of("alone", tests, lambda client: np.array([[2.0, 0.0]] * len(tests[client])))
    assert [(one.client, one.samples, one.accuracy) for one in rows] == [(0, 3, 0.0), (2, 1, 1.0)]
    assert all(math.isnan(one.auroc) and math.isnan(one.pr_auc) for one in rows)
    assert rows[0].loss == pytest.approx(2 + math.log1p(math.exp(-2)))
    assert rows[0].ece == pytest.approx(1 / (1 + math.exp(-2)))  # so sure, and always wrong


def test_a_model_that_diverged_has_an_accuracy_and_nothing_else_of_probabilities():
    row = row_of(np.array([[math.nan, 0.0], [0.0, 1.0]]), [0, 1])
    assert row.accuracy == 1.0
    assert all(math.isnan(getattr(row, name)) for name in ("auroc", "pr_auc", "ece", "loss"))


@pytest.mark.parametrize(("logits", "labels"), [(np.zeros((2, 3)), [0]), (np.zeros((1, 3)), [3]), (np.zeros(3), [0])])
def test_logits_that_do_not_fit_are_refused(logits, labels):
    with pytest.raises(FedskewError, match="^(logits|labels): must be"):
        row_of(logits, labels)


def made(client: int, row: str, samples: int, accuracy: float, loss: float) -> SiteRow:
    return SiteRow(client, row, samples, accuracy, accuracy, accuracy, math.nan, math.nan, 0.1, loss)


def test_over_the_clients_by_hand():
    accuracies = [0.9, 0.8, 0.7, 0.6, 0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]  # eleven: the worst tenth are two
    rows = [made(own, "common", 10 + 10 * (own == 0), value, 1 - value) for own, value in enumerate(accuracies)]
    rows += [made(client, "alone", 10, 0.65, 0.35) for client in range(10)]
    found = SiteRow.over_clients(rows)
    assert list(found) == ["alone", "common"]
    common = found["common"]["accuracy"]
    assert common["clients"] == 11
    assert common["losing"] == 4
    assert common["mean"] == pytest.approx(sum(accuracies) / 11)
    assert common["weighted"] == pytest.approx((sum(accuracies) + 0.9) / 12)
    assert common["median"] == 0.7
    assert common["worst_tenth"] == pytest.approx(0.45)
    assert common["std"] == pytest.approx(np.std(accuracies))
    assert found["common"]["loss"]["worst_tenth"] == pytest.approx(0.55)
    assert found["common"]["loss"]["losing"] == 4
    assert found["common"]["ece"]["losing"] == 0
    assert found["common"]["auroc"] == {
        "clients": 0,
        **dict.fromkeys(("mean", "weighted", "median", "worst_tenth", "std")),
    }
    assert "losing" not in found["alone"]["accuracy"]


# What sites count of test samples, with scores in bins: scikit-learn's figures of binned scores, bounds, lies.


KINDS = {"classes": Tally(3, scores=True), "labels": Tally(3, several=True, scores=True)}


def samples(tally, size=240):
    rng = np.random.default_rng(4)
    table = rng.random((size, 3)) < [0.5, 0.2, 0.05] if tally.several else np.eye(3)[rng.integers(0, 3, size)] > 0
    logits = 1.5 * table + rng.normal(size=(size, 3))
    return logits, as_bits(table) if tally.several else table.argmax(axis=1), table


@pytest.mark.parametrize("kind", KINDS)
def test_sums_over_sites_give_scikit_learns_figures_of_binned_scores(kind):
    tally = KINDS[kind]
    logits, targets, table = samples(tally)
    parts = [tally.count(logits[own], targets[own]) for own in np.array_split(np.arange(240), 3)]
    assert all(tally.refuse(part) is None for part in parts)
    total = sum(parts)
    assert (tally.refuse(total), tally.samples(total)) == (None, 240)
    probabilities = Scores(logits, targets).probabilities if kind == "classes" else 1 / (1 + np.exp(-logits))
    odds = np.log(probabilities / (1 - probabilities)) + (np.log(2) if kind == "classes" else 0)
    binned = np.floor(np.clip(32 * np.arcsinh(2 * odds) / np.arcsinh(16), -32, 31))
    found = Evaluation.of_tally(tally, total, 0.5)
    aurocs = [roc_auc_score(table[:, at], binned[:, at]) for at in range(3)]
    assert found.per_class_auroc == pytest.approx(aurocs)
    assert found.auroc == pytest.approx(np.mean(aurocs))
    precisions = [average_precision_score(table[:, at], binned[:, at]) for at in range(3)]
    assert found.per_class_pr_auc == pytest.approx(precisions)
    exact = np.mean([roc_auc_score(table[:, at], probabilities[:, at]) for at in range(3)])
    assert 0 < abs(found.auroc - exact) <= tally.auroc_error(total) < 0.025
    if kind == "classes":
        assert found.ece == pytest.approx(Scores(logits, targets).of_scores()["ece"], abs=15 / 1024 / 240)
    else:
        assert found.accuracy == finding_figures(logits, targets)["accuracy"]
        assert found.measure("auto") == "auroc"


def test_bins_are_narrow_in_the_middle_and_one_half_is_an_edge():
    tally = Tally(2, several=True, scores=True)
    counts = tally.count([[0.0, -0.01], [0.06, -9.0]], [1, 0])
    by_score = counts[9:].reshape(2, 2, 64)
    assert np.argwhere(by_score).tolist() == [[0, 0, 33], [0, 1, 32], [1, 0, 0], [1, 0, 31]]
    assert tally.auroc_error(counts) == 0  # of the first label; the second is undefined


def test_one_that_knows_nothing_is_ruined_or_has_no_sample():
    for tally in KINDS.values():
        logits, targets, _ = samples(tally)
        assert Evaluation.of_tally(tally, tally.count(0 * logits, targets), 1.0).auroc == 0.5
        assert tally.auroc_error(tally.count(0 * logits, targets)) == 0.5
        assert tally.refuse(tally.count(np.full_like(logits, np.nan), targets)) is None
        nothing = tally.count(logits[:0], targets[:0])
        assert (tally.samples(nothing), tally.refuse(nothing)) == (0, None)
        assert Evaluation.of_tally(tally, nothing, 0.0).auroc is None


LIES = [
    ("classes", [(9, 1)], "scores are of other samples than classes"),
    ("classes", [(9 + 2 * 64 * 3, 1)], "scores are of other samples"),
    ("classes", [(9 + 2 * 64 * 3 + 3 * 14 + 1, 300)], "confidences are of other samples"),
    ("classes", [(9 + 2 * 64 * 3 + 3 * 14 + 2, 10**6)], "confidences are in other bins"),
    ("classes", [(9, -1)], "below 0"),
    ("labels", [(13 + 1, 1)], "scores are of other samples than labels"),
    ("labels", [(13, 1), (13 + 64, -1), (13 + 2, -1), (13 + 64 + 2, 1)], "below 0"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), LIES)
def test_numbers_that_no_samples_have_are_refused(kind, changes, reason):
    tally = KINDS[kind]
    logits, targets, _ = samples(tally)
    counts = tally.count(logits, targets)
    for place, change in changes:
        counts[place] += change
    assert reason in tally.refuse(counts)
