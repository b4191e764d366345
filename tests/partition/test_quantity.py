from __future__ import annotations

import numpy as np
import pytest
from splits import counts_of, dealt

from fedskew.partition import Quantity


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_everybody_holds_k_labels_its_own_among_them(k: int) -> None:
    counts = dealt(Quantity(k), 100)
    assert np.all((counts > 0).sum(axis=1) == k)
    assert np.all(counts[np.arange(100), np.arange(100) % 10] > 0)


def test_a_class_is_shared_evenly_the_first_holders_getting_one_more() -> None:
    counts = dealt(Quantity(2), 100)
    for column in counts.T:
        held = column[column > 0]
        np.testing.assert_array_equal(held, [len(part) for part in np.array_split(np.arange(5000), len(held))])


def test_one_label_each_leaves_nothing_to_chance_but_the_samples() -> None:
    labels = np.repeat([0, 1, 2], [7, 4, 2])
    counts = dealt(Quantity(1), 6, labels)
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
    counts = dealt(Quantity(1), 4, labels)
    np.testing.assert_array_equal(counts, [[1, 0], [0, 25], [0, 0], [0, 25]])


def test_few_clients_may_hold_all_classes() -> None:
    counts = dealt(Quantity(10), 4)
    np.testing.assert_array_equal(counts, np.full((4, 10), 1250))
