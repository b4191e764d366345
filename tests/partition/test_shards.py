from __future__ import annotations

import numpy as np
import pytest
from splits import CIFAR_LABELS, counts_of, dealt

from fedskew.partition import PairedShards, Shards


def test_everybody_is_dealt_the_same_number_of_equal_shards() -> None:
    # 100 clients with 2 shards, 10 classes: 20 shards a class, 250 samples a shard.
    counts = dealt(Shards(2), 100)
    assert set(np.unique(counts)) <= {0, 250, 500}
    np.testing.assert_array_equal(counts.sum(axis=1), 500)
    np.testing.assert_array_equal(counts.sum(axis=0), 5000)


@pytest.mark.slow
def test_a_client_may_be_dealt_one_label_twice() -> None:
    # Of 200 shards the second is of the first's class with chance 19/199: 9.5 of 100 clients on average.
    doubles = [(dealt(Shards(2), 100, seed=seed) == 500).sum() for seed in range(50)]
    assert np.mean(doubles) == pytest.approx(100 * 19 / 199, abs=1.5)


def test_shards_of_a_class_differ_by_one_sample_at_most() -> None:
    labels = np.repeat([0, 1], [11, 7])
    counts = dealt(Shards(1), 8, labels)
    # 8 shards, 4 a class: 3 + 3 + 3 + 2 and 2 + 2 + 2 + 1.
    assert sorted(counts[counts[:, 0] > 0, 0]) == [2, 3, 3, 3]
    assert sorted(counts[counts[:, 1] > 0, 1]) == [1, 2, 2, 2]


def test_pairs_share_their_classes_exclusively() -> None:
    counts = dealt(PairedShards(2), 10)
    for pair in range(5):
        both = counts[2 * pair : 2 * pair + 2]
        np.testing.assert_array_equal(both.sum(axis=0), [5000 if c // 2 == pair else 0 for c in range(10)])
        assert np.all(both[:, 2 * pair : 2 * pair + 2] > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high", "least", "most"), [(1 / 20, 1 / 2, 250, 2499), (1 / 20, 1.0, 250, 4999)])
def test_the_first_of_a_pair_gets_a_uniform_part(low, high, least, most) -> None:
    rng = np.random.default_rng(0)
    firsts = np.concatenate(
        [
            np.diagonal(counts_of(PairedShards(1, low, high).split(CIFAR_LABELS, 20, rng), CIFAR_LABELS)[::2])
            for _ in range(60)
        ]
    )
    assert firsts.min() >= least
    assert firsts.max() <= most
    assert firsts.mean() == pytest.approx((least + most) / 2, rel=0.06)
    assert firsts.std() == pytest.approx((most - least) / np.sqrt(12), rel=0.08)


def test_the_last_pair_may_hold_fewer_classes() -> None:
    labels = np.repeat(np.arange(3), 100)
    counts = dealt(PairedShards(2), 4, labels)
    np.testing.assert_array_equal(counts > 0, [[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]])


def test_a_class_of_one_sample_goes_to_the_second() -> None:
    counts = counts_of(PairedShards(1).split([0], 2, np.random.default_rng(0)), np.array([0]), 1)
    np.testing.assert_array_equal(counts, [[0], [1]])


def test_ag_news_is_shared_by_two_groups_of_five() -> None:
    # floor(10 * 2 / 4) = 5 holders; each but the last gets from a tenth of the equal part of 600 up to just below it.
    labels, rng = np.repeat(np.arange(4), 3000), np.random.default_rng(0)
    splits = [counts_of(PairedShards(2).split(labels, 10, rng), labels, 4) for _ in range(40)]
    for counts in splits:
        np.testing.assert_array_equal(counts > 0, np.repeat([[1, 1, 0, 0], [0, 0, 1, 1]], 5, axis=0))
        np.testing.assert_array_equal(counts.sum(axis=0), 3000)
    firsts = np.concatenate([counts[[0, 1, 2, 3]][:, :2].ravel() for counts in splits])
    assert firsts.min() >= 60
    assert firsts.max() <= 599
    assert firsts.mean() == pytest.approx((60 + 599) / 2, rel=0.06)
    assert len(PairedShards(2, high=0.625).split(labels, 10, rng)) == 10, "the largest that five can all have"


def test_twice_as_many_clients_make_groups_of_four_and_half_as_many_share_nothing() -> None:
    counts = dealt(PairedShards(2), 20)
    np.testing.assert_array_equal((counts > 0).sum(axis=0), 4)
    alone = dealt(PairedShards(2), 5)
    np.testing.assert_array_equal(alone, np.kron(np.eye(5, dtype=int), [[5000, 5000]]))
