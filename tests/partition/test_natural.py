import numpy as np
import pytest

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import grouped, natural_split


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


def cameras(*sizes: int) -> list[np.ndarray]:
    return natural_split(np.repeat(np.arange(len(sizes)), sizes), len(sizes))


def test_whole_cameras_are_put_together_from_the_largest_to_the_smallest() -> None:
    # 9 | 7 | then 5 joins 7 (12), 4 joins 9 (13), 3 joins 12 (15), 1 joins 13 (14), an empty one joins 14.
    split = grouped(cameras(5, 9, 1, 7, 0, 4, 3), 2)
    assert [len(held) for held in split] == [14, 15]
    ids = np.repeat(np.arange(7), (5, 9, 1, 7, 0, 4, 3))
    assert [sorted(set(ids[held].tolist())) for held in split] == [[1, 2, 5], [0, 3, 6]]
    assert all(np.all(np.diff(held) > 0) for held in split)


def test_equal_cameras_go_to_the_first_of_equal_clients() -> None:
    assert [held.tolist() for held in grouped(cameras(1, 1, 1, 1), 3)] == [[0, 3], [1], [2]]


def test_as_many_clients_as_cameras_keep_them_apart() -> None:
    assert [len(held) for held in grouped(cameras(2, 5, 3), 3)] == [5, 3, 2]


@pytest.mark.parametrize("clients", [0, 4])
def test_refuses_to_cut_cameras_up(clients: int) -> None:
    with pytest.raises(PartitionError, match=f"names, 3, can't be merged into {clients}"):
        grouped(cameras(2, 5, 3), clients)


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
