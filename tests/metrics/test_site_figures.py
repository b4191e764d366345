"""Figures at clients: scikit-learn's definitions, undefined ones, and what they are over the clients."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from fedskew.errors import FedskewError
from fedskew.metrics import SiteRow


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
