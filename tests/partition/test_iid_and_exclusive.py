from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition import IIDAndExclusive

EMNIST_LABELS = np.repeat(np.arange(47), 2400)
CIFAR100_LABELS = np.repeat(np.arange(100), 500)


def counts_of(split: list[np.ndarray], labels: np.ndarray, classes: int) -> np.ndarray:
    return np.stack([np.bincount(labels[held], minlength=classes) for held in split])


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


@pytest.mark.parametrize(("unique", "works"), [(1, False), (2, True), (5, True), (10, True)])
def test_cifar100_has_too_few_of_a_class_for_one_exclusive_label(unique: int, works: bool) -> None:
    rule = IIDAndExclusive(0.3, unique, 1000)
    if works:
        assert len(rule.split(CIFAR100_LABELS, 10, np.random.default_rng(0))) == 10
    else:
        with pytest.raises(PartitionError, match="has 500 samples and its owner needs 1000: lower samples_per_client"):
            rule.split(CIFAR100_LABELS, 10, np.random.default_rng(0))


def test_iid_clients_follow_the_remaining_samples() -> None:
    labels = np.repeat([0, 1, 2], [6000, 3000, 3000])
    counts = counts_of(IIDAndExclusive(0.0, 1, 5000).split(labels, 2, np.random.default_rng(0)), labels, 3)
    # Hypergeometric with mean 2500, 1250, 1250 and standard deviation about 20.
    np.testing.assert_allclose(counts, [[2500, 1250, 1250]] * 2, atol=100)


def test_samples_that_do_not_divide_evenly_go_to_the_first_labels() -> None:
    labels = np.repeat(np.arange(4), 10)
    counts = counts_of(IIDAndExclusive(0.5, 3, 7).split(labels, 2, np.random.default_rng(0)), labels, 4)
    assert sorted(counts[0]) == [0, 2, 2, 3]


def test_all_clients_may_be_exclusive_and_own_all_classes() -> None:
    labels = np.repeat(np.arange(4), 10)
    counts = counts_of(IIDAndExclusive(1.0, 2, 20).split(labels, 2, np.random.default_rng(0)), labels, 4)
    np.testing.assert_array_equal(counts.sum(axis=0), 10)
    np.testing.assert_array_equal((counts > 0).sum(axis=0), 1)


def test_refuses_what_does_not_fit_and_says_what_to_change() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(PartitionError, match="lower exclusive_share or labels_per_client"):
        IIDAndExclusive(0.5, 2, 10).split(np.repeat(np.arange(4), 100), 4, rng)
    with pytest.raises(PartitionError, match="have 300 samples and 3 clients need 600: lower samples_per_client"):
        IIDAndExclusive(0.25, 2, 200).split(np.repeat(np.arange(5), 100), 4, rng)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((1.1, 1, 1), "exclusive_share"), ((-0.1, 1, 1), "exclusive_share"), ((float("nan"), 1, 1), "exclusive_share"),
     ((0.5, 0, 1), "labels_per_client"), ((0.5, 1, 0), "samples_per_client")],
)  # fmt: skip
def test_refuses_bad_parameters_by_name(arguments, named) -> None:
    with pytest.raises(ArgumentError, match=named):
        IIDAndExclusive(*arguments)
