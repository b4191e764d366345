"""What sites count of test samples, with scores in bins: scikit-learn's figures of binned scores, bounds, lies."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fedskew import findings
from fedskew.engine import Evaluation
from fedskew.metrics import Scores, Tally, finding_figures

KINDS = {"classes": Tally(3, scores=True), "labels": Tally(3, several=True, scores=True)}


def samples(tally, size=240):
    rng = np.random.default_rng(4)
    table = rng.random((size, 3)) < [0.5, 0.2, 0.05] if tally.several else np.eye(3)[rng.integers(0, 3, size)] > 0
    logits = 1.5 * table + rng.normal(size=(size, 3))
    return logits, findings.as_bits(table) if tally.several else table.argmax(axis=1), table


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
