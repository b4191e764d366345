from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import Natural, natural_split


def test_samples_go_to_the_client_that_their_id_names() -> None:
    split = natural_split(["b", "a", "b", "c", "a"])
    assert [held.tolist() for held in split] == [[1, 4], [0, 2], [3]]


def test_numbers_are_ids_too() -> None:
    split = natural_split(np.array([7, 3, 7], dtype=np.uint64))
    assert [held.tolist() for held in split] == [[1], [0, 2]]


def test_with_a_number_of_clients_an_absent_id_is_an_empty_client() -> None:
    split = natural_split([2, 0, 2], clients=4)
    assert [held.tolist() for held in split] == [[1], [], [0, 2], []]
    assert all(held.dtype == np.int64 for held in split)


@pytest.mark.parametrize(
    ("ids", "clients", "message"),
    [
        ([], None, "one id per sample"),
        ([[1]], None, "one id per sample"),
        ([0.5], None, "must be integers or strings, not float64"),
        (["a"], 1, "must be integers, not <U1"),
        ([0, 3], 3, "must be from 0 to 2, but 0 to 3 occur"),
        ([-1, 0], 3, "must be from 0 to 2, but -1 to 0 occur"),
    ],
)
def test_refuses_other_ids(ids, clients, message) -> None:
    with pytest.raises(ArgumentError, match=f"client_ids: .*{message}"):
        natural_split(ids, clients)


def test_labels_alone_can_not_be_divided_naturally() -> None:
    with pytest.raises(PartitionError, match="choose another partition rule"):
        Natural().split([0, 1], 2, np.random.default_rng(0))
