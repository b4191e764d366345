from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.metrics import balanced_accuracy, macro_f1, per_class_accuracy, target_accuracy

# Class 3 is neither true nor predicted, class 2 is only predicted.
TABLE = [[3, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]

pairs = st.integers(2, 5).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=40),
    )
)


def test_no_samples_make_an_empty_table() -> None:
    table = np.zeros((3, 3))
    assert np.isnan(per_class_accuracy(table)).all()
    assert math.isnan(balanced_accuracy(table))
    assert math.isnan(macro_f1(table))
    assert math.isnan(target_accuracy(table, [1, 0, 0]))


def test_accuracy_of_an_absent_class_is_not_a_number() -> None:
    np.testing.assert_array_equal(per_class_accuracy(TABLE), [0.75, 0.5, np.nan, np.nan])


def test_balanced_accuracy_is_the_mean_over_present_classes() -> None:
    assert balanced_accuracy(TABLE) == 0.625


def test_macro_f1_over_present_or_over_seen_classes() -> None:
    # F1 of class 0: 6/(4 + 3) = 6/7; of class 1: 2/(2 + 2) = 1/2; of class 2, only predicted: 0.
    assert macro_f1(TABLE) == pytest.approx((6 / 7 + 1 / 2) / 2)
    assert macro_f1(TABLE, present_only=False) == pytest.approx((6 / 7 + 1 / 2) / 3)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn=pairs)
def test_agrees_with_scikit_learn(drawn) -> None:
    from sklearn import metrics as reference

    classes, rows = drawn
    targets, predictions = map(list, zip(*rows, strict=True))
    table = reference.confusion_matrix(targets, predictions, labels=range(classes))
    recall = reference.recall_score(targets, predictions, labels=sorted(set(targets)), average=None, zero_division=0)
    assert balanced_accuracy(table) == pytest.approx(recall.mean())
    np.testing.assert_allclose(per_class_accuracy(table)[sorted(set(targets))], recall)
    for present_only, labels in ((True, sorted(set(targets))), (False, None)):
        expected = reference.f1_score(targets, predictions, labels=labels, average="macro", zero_division=0)
        assert macro_f1(table, present_only=present_only) == pytest.approx(expected)


def test_target_accuracy_weighs_classes_by_the_target() -> None:
    assert target_accuracy(TABLE, [1, 3, 0, 0]) == pytest.approx(0.25 * 0.75 + 0.75 * 0.5)


def test_target_accuracy_at_the_test_sets_own_mix_is_accuracy() -> None:
    table = np.random.default_rng(0).integers(1, 20, (6, 6))
    assert target_accuracy(table, table.sum(axis=1)) == pytest.approx(np.trace(table) / table.sum())


def test_target_accuracy_is_unknown_where_a_wanted_class_has_no_sample() -> None:
    assert math.isnan(target_accuracy(TABLE, [1, 1, 1, 0]))


@pytest.mark.parametrize("target", [[1, 1], [0, 0, 0, 0], [1, -1, 1, 1], [1, float("nan"), 0, 0]])
def test_refuses_what_is_no_target(target) -> None:
    with pytest.raises(ArgumentError, match="target"):
        target_accuracy(TABLE, target)


@pytest.mark.parametrize("table", [np.ones((2, 3)), np.ones(4), np.ones((0, 0)), [[1, -1], [0, 1]], [[math.nan]]])
def test_refuses_what_is_no_confusion_matrix(table) -> None:
    for figure in (per_class_accuracy, balanced_accuracy, macro_f1):
        with pytest.raises(ArgumentError, match="confusion: must"):
            figure(table)
