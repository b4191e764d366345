"""The record of label counts, and the checks that every function taking counts shares."""

from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts, as_counts, as_sizes, as_target, class_group_matrix, describe

COUNTS = [[30, 10, 0], [0, 0, 0], [1, 2, 5]]


def test_sizes_marginals_and_pooled_counts_follow_from_the_counts() -> None:
    record = LabelCounts(COUNTS)
    assert record.sizes.tolist() == [40, 0, 8]
    assert record.marginals.tolist() == [[0.75, 0.25, 0], [0, 0, 0], [0.125, 0.25, 0.625]]
    assert record.pooled.tolist() == [31, 12, 5]
    assert len(record) == 3
    assert record.counts.dtype == np.float64


def test_names_default_to_numbers_and_are_kept_where_given() -> None:
    assert LabelCounts(COUNTS).clients == LabelCounts(COUNTS).classes == ("0", "1", "2")
    named = LabelCounts(COUNTS, ["a", "b", "c"], ["x", "y", "z"])
    assert (named.clients, named.classes) == (("a", "b", "c"), ("x", "y", "z"))


def test_take_keeps_order_and_names() -> None:
    taken = LabelCounts(COUNTS, ["a", "b", "c"], ["x", "y", "z"]).take([2, 0])
    assert taken.counts.tolist() == [[1, 2, 5], [30, 10, 0]]
    assert (taken.clients, taken.classes) == (("c", "a"), ("x", "y", "z"))
    assert LabelCounts(COUNTS).take(np.array([2])).clients == ("2",)
    assert LabelCounts(COUNTS).take([1, 1]).clients == ("0", "1")  # twice: other names


def test_the_record_is_read_only_and_leaves_the_callers_array_writable() -> None:
    mine = np.array(COUNTS, dtype=float)
    record = LabelCounts(mine)
    with pytest.raises(ValueError, match="read-only"):
        record.counts[0, 0] = 1
    mine[0, 0] = 7
    assert np.shares_memory(record.counts, mine)


def test_a_record_stands_wherever_counts_are_taken() -> None:
    record = LabelCounts(COUNTS)
    assert as_counts(record) is record.counts
    assert np.asarray(record).tolist() == COUNTS
    assert np.array(record, copy=True).flags.writeable


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2, 3], r"counts: must have the shape \(clients, classes\), not \(3,\)"),
        ([[[1]]], r"not \(1, 1, 1\)"),
        (np.zeros((0, 3)), r"counts: must have the shape \(clients, classes\), not \(0, 3\)"),
        (np.zeros((3, 0)), r"counts: must have the shape \(clients, classes\), not \(3, 0\)"),
        ([[1, 2], [3]], "every row of the same length"),
        ([["many", "few"]], "must be an array of numbers"),
        (None, "counts: must"),
        ([[1, 2], [-1, 0]], r"counts\[1, 0\] is -1"),
        ([[1, np.nan]], r"counts\[0, 1\] is nan"),
        ([[np.inf, 1]], r"counts\[0, 0\] is inf"),
    ],
)
def test_counts_that_cannot_be_are_refused_by_name(counts: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        as_counts(counts)
    with pytest.raises(ValueError, match=message):
        LabelCounts(counts)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"clients": ["a", "b"]}, "clients: expected a name for each of 3, got 2"),
        ({"classes": ["x", "y", "x"]}, "classes: the name 'x' occurs twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LabelCounts(COUNTS, **names)


@pytest.mark.parametrize("ids", [[3], [-1], [0.5], [[0]], ["a"]])
def test_take_refuses_clients_that_do_not_exist(ids: list[object]) -> None:
    with pytest.raises(ArgumentError, match="ids: "):
        LabelCounts(COUNTS).take(ids)


def test_a_target_is_normalised() -> None:
    assert as_target([2, 1, 1], 3).tolist() == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("target", [[1, 1], [[1, 1, 1]], [0, 0, 0], [1, -1, 1], [np.nan, 1, 1], [np.inf, 1, 1], "abc"])
def test_a_target_that_cannot_be_a_mix_is_refused(target: object) -> None:
    with pytest.raises(ArgumentError, match="target: "):
        as_target(target, 3)


@pytest.mark.parametrize("sizes", [[1, 2], [1, 2, -3], [1, 2, np.nan], [[1, 2, 3]]])
def test_sizes_that_do_not_fit_are_refused(sizes: object) -> None:
    with pytest.raises(ArgumentError, match="sizes: "):
        as_sizes(sizes, as_counts(COUNTS))


def test_groups_are_vacant_minority_and_majority_by_an_even_share_of_the_client() -> None:
    # FedVLS, table 7, client 0 (class 3 minority, 5, 8, 9 majority); an even share of 10 is not more than itself.
    client = [0, 0, 0, 300, 0, 2000, 0, 0, 1500, 900]
    assert class_group_matrix([client]).tolist() == [[0, 0, 0, 1, 0, 2, 0, 0, 2, 2]]
    assert class_group_matrix([[10, 10, 10], [0, 0, 0], [9, 10, 11]]).tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 2]]


class Parts:
    """A partitioner of flwr-datasets, with its tables."""

    def __init__(self, parts: list[list[object]], names: list[str] | None = None) -> None:
        self.num_partitions, self._parts, self._names = len(parts), parts, names

    def load_partition(self, place: int) -> object:
        features = {"label": SimpleNamespace(names=self._names)} if self._names else {}
        table = UserDict({"label": self._parts[place]})
        table.features = features
        return table


def test_partitions_of_a_partitioner_of_flower_are_counted() -> None:
    named = LabelCounts.of_partitions(Parts([[0, 2, 2], [], [1]], ["cat", "dog", "eel"]))
    assert named.classes == ("cat", "dog", "eel")
    assert named.counts.tolist() == [[1, 0, 2], [0, 0, 0], [0, 1, 0]]
    plain = LabelCounts.of_partitions(Parts([[7, 7], [3]]))
    assert (plain.classes, plain.counts.tolist()) == (("3", "7"), [[0, 2], [1, 0]])
    words = LabelCounts.of_partitions(Parts([["no", "yes"], ["no"]]))
    assert (words.classes, words.counts.tolist()) == (("no", "yes"), [[1, 1], [1, 0]])
    assert describe(named).inter_client is not None
    with pytest.raises(ArgumentError, match="partitioner: Parts gives no labels 'digit'"):
        LabelCounts.of_partitions(Parts([[1]]), label="digit")
    with pytest.raises(ArgumentError, match="partitioner: dict gives no labels"):
        LabelCounts.of_partitions({})
