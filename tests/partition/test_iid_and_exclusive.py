from __future__ import annotations

import numpy as np
import pytest
from splits import counts_of, dealt

from fedskew.partition import IIDAndExclusive

EMNIST_LABELS = np.repeat(np.arange(47), 2400)
CIFAR100_LABELS = np.repeat(np.arange(100), 500)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("unique", [1, 2, 3, 4, 6])
def test_every_emnist_setting_of_the_paper(share: float, unique: int) -> None:
    rule = IIDAndExclusive(share, unique, 2400)
    counts = counts_of(rule.split(EMNIST_LABELS, 10, np.random.default_rng(0)), EMNIST_LABELS, 47)
    exclusive = round(10 * share)
    np.testing.assert_array_equal(counts.sum(axis=1), 2400)
    own = counts[:exclusive]
    assert np.all((own > 0).sum(axis=1) == unique)
    assert set(np.unique(own)) == {0, 2400 // unique}
    owned = (own > 0).any(axis=0)
    assert owned.sum() == exclusive * unique
    # Nobody else holds an owned class; each of the others is held by all IID clients (about 51 samples or more).
    assert np.all(counts[exclusive:, owned] == 0)
    assert np.all(counts[exclusive:, ~owned] > 0)


@pytest.mark.parametrize("unique", [2, 5, 10])
def test_cifar100_has_enough_of_a_class_for_two_exclusive_labels_or_more(unique: int) -> None:
    assert len(IIDAndExclusive(0.3, unique, 1000).split(CIFAR100_LABELS, 10, np.random.default_rng(0))) == 10


def test_iid_clients_follow_the_remaining_samples() -> None:
    labels = np.repeat([0, 1, 2], [6000, 3000, 3000])
    counts = dealt(IIDAndExclusive(0.0, 1, 5000), 2, labels)
    # Hypergeometric with mean 2500, 1250, 1250 and standard deviation about 20.
    np.testing.assert_allclose(counts, [[2500, 1250, 1250]] * 2, atol=100)


def test_samples_that_do_not_divide_evenly_go_to_the_first_labels() -> None:
    labels = np.repeat(np.arange(4), 10)
    counts = dealt(IIDAndExclusive(0.5, 3, 7), 2, labels)
    assert sorted(counts[0]) == [0, 2, 2, 3]


def test_all_clients_may_be_exclusive_and_own_all_classes() -> None:
    labels = np.repeat(np.arange(4), 10)
    counts = dealt(IIDAndExclusive(1.0, 2, 20), 2, labels)
    np.testing.assert_array_equal(counts.sum(axis=0), 10)
    np.testing.assert_array_equal((counts > 0).sum(axis=0), 1)
