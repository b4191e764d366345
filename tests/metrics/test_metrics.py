"""Figures of a confusion matrix, of label counts and of updates: by hand, at their edges, and what they refuse."""

from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.metrics import (
    balanced_accuracy,
    class_groups,
    drift_diversity,
    macro_f1,
    mix_distance,
    per_class_accuracy,
    target_accuracy,
)

# Class 3 is neither true nor predicted, class 2 is only predicted.
TABLE, NONE = [[3, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], np.zeros((3, 3))
RNG = np.random.default_rng(0)
POOL, SEEN = RNG.integers(0, 9, (5, 4)), RNG.integers(1, 20, (6, 6))


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (lambda: per_class_accuracy(TABLE), [0.75, 0.5, nan, nan]),
        (lambda: per_class_accuracy(NONE), [nan] * 3),
        (lambda: balanced_accuracy(TABLE), 0.625),  # over present classes
        (lambda: balanced_accuracy(NONE), nan),
        # F1 of class 0: 6/(4 + 3) = 6/7; of class 1: 2/(2 + 2) = 1/2; of class 2, only predicted: 0.
        (lambda: macro_f1(TABLE), (6 / 7 + 1 / 2) / 2),
        (lambda: macro_f1(TABLE, present_only=False), (6 / 7 + 1 / 2) / 3),
        (lambda: macro_f1(NONE), nan),
        (lambda: target_accuracy(TABLE, [1, 3, 0, 0]), 0.25 * 0.75 + 0.75 * 0.5),
        (lambda: target_accuracy(SEEN, SEEN.sum(axis=1)), np.trace(SEEN) / SEEN.sum()),
        (lambda: target_accuracy(TABLE, [1, 1, 1, 0]), nan),  # a wanted class has no sample
        (lambda: target_accuracy(NONE, [1, 0, 0]), nan),
        # Marginals (1, 0) and (.25, .75), weights .4 and .6: (.55, .45), from (.5, .5): 2 * .05**2.
        (lambda: mix_distance([0.4, 0.6], [[10, 0], [1, 3]], [2, 2]), 0.005),
        (lambda: mix_distance(POOL.sum(axis=1) / POOL.sum(), POOL, POOL.sum(axis=0)), 0),
        # FedPALS's synthetic task, (.5, .5, 0) and (.5, 0, .5): equal weights leave d (-.5, .25, .25), squared 3/8 d^2.
        (lambda: mix_distance([0.5, 0.5], [[20, 20, 0], [9, 0, 9]], [0.5, 0.25, 0.25]), 0),
        (lambda: mix_distance([0.5, 0.5], [[20, 20, 0], [9, 0, 9]], [0.35, 0.325, 0.325]), 0.375 * 0.3**2),
        (lambda: mix_distance([0.5, 0.5], [[20, 20, 0], [9, 0, 9]], [0, 0.5, 0.5]), 0.375),
        (lambda: mix_distance([0.5, 0.5], [[0, 0], [3, 0]], [1, 0]), 0.25),  # an empty client has no marginals
        # Squared norms 25 and 1 over the squared norm of the sum (3, 5).
        (lambda: drift_diversity([[3.0, 4.0], [0.0, 1.0]]), 26 / 34),
        (lambda: drift_diversity(torch.tensor([[3.0, 4.0], [0.0, 1.0]]).double()), 26 / 34),
        (lambda: drift_diversity(np.tile([1.0, -2.0, 0.5], (5, 1))), 1 / 5),  # the least
        (lambda: drift_diversity(3 * np.eye(4)), 1),
        (lambda: drift_diversity([[3.0, 4.0], [4.0, -3.0]]), 1),  # (25 + 25) over |(7, 1)|^2
        (lambda: drift_diversity(np.array([[3.0, 4.0], [4.0, -3.0]]), [5.0, 5.0]), 1),  # with known norms
        (lambda: drift_diversity([[2.0, 1.0]]), 1),
        (lambda: drift_diversity(np.zeros((4, 3))), 1 / 4),  # where nobody moves nobody drifts
        (lambda: drift_diversity([[1.0, 2.0], [-1.0, -2.0]]), inf),
    ],
)
def test_worked_out_by_hand(figure, expected) -> None:
    np.testing.assert_allclose(figure(), expected, rtol=1e-9, atol=1e-15)


def test_drift_has_no_scale_and_a_least_value_and_leaves_the_updates_alone() -> None:
    for seed in range(20):
        updates = np.random.default_rng(seed).normal(size=(5, 3))
        updates.setflags(write=False)
        assert drift_diversity(updates) >= 1 / 5
        assert drift_diversity(1e-8 * updates) == pytest.approx(drift_diversity(updates))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(classes=st.integers(2, 5), data=st.data())
def test_agrees_with_scikit_learn(classes, data) -> None:
    from sklearn import metrics as reference

    label = st.integers(0, classes - 1)
    rows = data.draw(st.lists(st.tuples(label, label), min_size=1, max_size=40))
    targets, predictions = map(list, zip(*rows, strict=True))
    table = reference.confusion_matrix(targets, predictions, labels=range(classes))
    recall = reference.recall_score(targets, predictions, labels=sorted(set(targets)), average=None, zero_division=0)
    assert balanced_accuracy(table) == pytest.approx(recall.mean())
    np.testing.assert_allclose(per_class_accuracy(table)[sorted(set(targets))], recall)
    for present_only, labels in ((True, sorted(set(targets))), (False, None)):
        expected = reference.f1_score(targets, predictions, labels=labels, average="macro", zero_division=0)
        assert macro_f1(table, present_only=present_only) == pytest.approx(expected)


def test_client_0_of_fedvls_table_7() -> None:
    groups = class_groups([0, 0, 0, 141, 0, 1471, 0, 0, 1360, 366])
    assert [group.tolist() for group in groups] == [[5, 8, 9], [3], [0, 1, 2, 4, 6, 7]]
    assert class_groups(np.full(4, 7)).minority.tolist() == [0, 1, 2, 3]  # exactly the mean
    assert class_groups(np.zeros(3)).vacant.tolist() == [0, 1, 2]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_every_class_is_in_one_group(counts) -> None:
    groups = class_groups(counts)
    assert sorted(np.concatenate(groups)) == list(range(len(counts)))
    assert all(group.dtype == np.int64 for group in groups)
    mean = sum(counts) / len(counts)
    assert groups.majority.tolist() == [c for c, n in enumerate(counts) if n > mean]
    assert groups.vacant.tolist() == [c for c, n in enumerate(counts) if n == 0]


TWO = np.array([[3.0, 4.0], [4.0, -3.0]])
CONFUSIONS = {
    r"must be square, \(classes, classes\), not of shape \(2, 3\)": [np.ones((2, 3))],
    r"must have the shape \(classes, classes\), not": [np.ones(4), np.ones((0, 0))],
    "every number must be finite and not negative": [[[1, -1], [0, 1]], [[nan]]],
}


@pytest.mark.parametrize(
    ("figure", "arguments", "message"),
    [
        *(
            (figure, (table,), f"confusion: {says}")
            for figure in (per_class_accuracy, balanced_accuracy, macro_f1)
            for says, tables in CONFUSIONS.items()
            for table in tables
        ),
        *((target_accuracy, (TABLE, to), "target") for to in ([1, 1], [0, 0, 0, 0], [1, -1, 1, 1], [1, nan, 0, 0])),
        *(
            (mix_distance, (weights, [[1, 2], [3, 4]], [1, 1]), r"weights: must have the shape \(2,\), one number per")
            for weights in ([1.0], [[0.5, 0.5]])
        ),
        *(
            (mix_distance, (weights, [[1, 2], [3, 4]], [1, 1]), "weights: every number must be finite and not negative")
            for weights in ([0.5, nan], [1.5, -0.5])
        ),
        (mix_distance, ([1.0], [[1, 2]], [1, 1, 1]), "target"),
        *(
            (drift_diversity, (updates,), r"updates: must be \(clients, parameters\)")
            for updates in (np.ones(3), np.ones((0, 3)), torch.ones(2, 3, 4))
        ),
        *((drift_diversity, ([[1.0], [value]],), "updates: must be finite") for value in (nan, inf)),
        (drift_diversity, (torch.ones(2, 3, dtype=torch.int64),), "updates: must be of floating point"),
        (drift_diversity, (TWO, [1.0, 2.0, 3.0]), r"norms: expected one for each of 2 updates, got shape \(3,\)"),
        *((class_groups, (counts,), "counts") for counts in ([[1, 2]], [], [1, -1], [1.0, nan])),
    ],
)
def test_what_does_not_fit_is_refused_by_name(figure, arguments, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        figure(*arguments)
