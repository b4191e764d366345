from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import Quantity

CIFAR_LABELS = np.repeat(np.arange(10), 5000)


def counts_of(split: list[np.ndarray], labels: np.ndarray, classes: int = 10) -> np.ndarray:
    return np.stack([np.bincount(labels[held], minlength=classes) for held in split])


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_everybody_holds_k_labels_its_own_among_them(k: int) -> None:
    counts = counts_of(Quantity(k).split(CIFAR_LABELS, 100, np.random.default_rng(0)), CIFAR_LABELS)
    assert np.all((counts > 0).sum(axis=1) == k)
    assert np.all(counts[np.arange(100), np.arange(100) % 10] > 0)


def test_a_class_is_shared_evenly_the_first_holders_getting_one_more() -> None:
    counts = counts_of(Quantity(2).split(CIFAR_LABELS, 100, np.random.default_rng(0)), CIFAR_LABELS)
    for column in counts.T:
        held = column[column > 0]
        np.testing.assert_array_equal(held, [len(part) for part in np.array_split(np.arange(5000), len(held))])


def test_one_label_each_leaves_nothing_to_chance_but_the_samples() -> None:
    labels = np.repeat([0, 1, 2], [7, 4, 2])
    counts = counts_of(Quantity(1).split(labels, 6, np.random.default_rng(0)), labels, 3)
    np.testing.assert_array_equal(counts, [[4, 0, 0], [0, 2, 0], [0, 0, 1], [3, 0, 0], [0, 2, 0], [0, 0, 1]])


def test_the_other_labels_are_uniform() -> None:
    # With k = 2 the second label of a client is each of 9 others with chance 1/9; 1000 clients per own label.
    labels = np.repeat(np.arange(10), 10_000)
    counts = counts_of(Quantity(2).split(labels, 10_000, np.random.default_rng(0)), labels)
    seconds = np.array([(counts[own::10] > 0).sum(axis=0) for own in range(10)])
    others = seconds[~np.eye(10, dtype=bool)]
    assert others.sum() == 10_000
    np.testing.assert_allclose(others, 1000 / 9, atol=5 * np.sqrt(1000 / 9))


def test_a_class_with_fewer_samples_than_holders_leaves_some_without() -> None:
    labels = np.repeat([0, 1], [1, 50])
    counts = counts_of(Quantity(1).split(labels, 4, np.random.default_rng(0)), labels, 2)
    np.testing.assert_array_equal(counts, [[1, 0], [0, 25], [0, 0], [0, 25]])


def test_refuses_fewer_clients_than_classes() -> None:
    with pytest.raises(PartitionError, match="5 clients leave some of 10 classes without a holder: take at least 10"):
        Quantity(2).split(CIFAR_LABELS, 5, np.random.default_rng(0))


def test_few_clients_may_hold_all_classes() -> None:
    counts = counts_of(Quantity(10).split(CIFAR_LABELS, 4, np.random.default_rng(0)), CIFAR_LABELS)
    np.testing.assert_array_equal(counts, np.full((4, 10), 1250))


def test_refuses_more_labels_than_there_are() -> None:
    with pytest.raises(PartitionError, match="a client can't hold 11 of 10 classes: lower labels_per_client"):
        Quantity(11).split(CIFAR_LABELS, 20, np.random.default_rng(0))
    with pytest.raises(ArgumentError, match="^labels_per_client: input should be greater than or equal to 1"):
        Quantity(0)
