"""What the other rules give each client, by hand and by the statistics of their draws."""

import numpy as np
import pytest
from splits import CIFAR_LABELS, IID, OneLabelMissing, dealt, labelled

from fedskew.errors import ArgumentError
from fedskew.partition import IIDAndExclusive, PairedShards, Quantity, Shards, Sparsity, stratified

TENS = np.eye(10, dtype=int)


@pytest.mark.parametrize(
    ("rule", "labels", "expected"),
    [
        (Quantity(1), labelled(7, 4, 2), [[4, 0, 0], [0, 2, 0], [0, 0, 1], [3, 0, 0], [0, 2, 0], [0, 0, 1]]),
        # a class with fewer samples than holders leaves some without
        (Quantity(1), labelled(1, 50), [[1, 0], [0, 25], [0, 0], [0, 25]]),
        (Quantity(10), CIFAR_LABELS, np.full((4, 10), 1250)),
        (Sparsity(10), CIFAR_LABELS, np.full((10, 10), 500)),
        (OneLabelMissing(1.0), labelled(30, 30, 30, 30), 10 * (1 - np.fliplr(np.eye(4, dtype=int)))),
        (PairedShards(1), labelled(1), [[0], [1]]),
        (PairedShards(2), CIFAR_LABELS, np.kron(np.eye(5, dtype=int), [[5000, 5000]])),
    ],
)
def test_where_only_the_samples_are_drawn_counts_are_those_by_hand(rule, labels, expected) -> None:
    np.testing.assert_array_equal(dealt(rule, len(expected), labels), expected)


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_everybody_holds_k_labels_its_own_among_them(k: int) -> None:
    counts = dealt(Quantity(k), 100)
    assert np.all((counts > 0).sum(axis=1) == k)
    assert np.all(counts[np.arange(100), np.arange(100) % 10] > 0)


def test_a_class_is_shared_evenly_the_first_holders_getting_one_more() -> None:
    for column in dealt(Quantity(2), 100).T:
        held = column[column > 0]
        np.testing.assert_array_equal(held, [len(part) for part in np.array_split(np.arange(5000), len(held))])


def test_the_other_labels_are_uniform() -> None:
    # With k = 2 the second label of a client is each of 9 others with chance 1/9; 1000 clients per own label.
    counts = dealt(Quantity(2), 10_000, labelled(*[10_000] * 10))
    seconds = np.array([(counts[own::10] > 0).sum(axis=0) for own in range(10)])
    others = seconds[~TENS.astype(bool)]
    assert others.sum() == 10_000
    np.testing.assert_allclose(others, 1000 / 9, atol=5 * np.sqrt(1000 / 9))


def test_everybody_is_dealt_the_same_number_of_equal_shards() -> None:
    # 100 clients with 2 shards, 10 classes: 20 shards a class, 250 samples a shard.
    counts = dealt(Shards(2), 100)
    assert set(np.unique(counts)) <= {0, 250, 500}
    np.testing.assert_array_equal(counts.sum(axis=1), 500)
    np.testing.assert_array_equal(counts.sum(axis=0), 5000)
    # 8 shards, 4 a class: 3 + 3 + 3 + 2 and 2 + 2 + 2 + 1.
    counts = dealt(Shards(1), 8, labelled(11, 7))
    assert [sorted(column[column > 0]) for column in counts.T] == [[2, 3, 3, 3], [1, 2, 2, 2]]


@pytest.mark.slow
def test_a_client_may_be_dealt_one_label_twice() -> None:
    # Of 200 shards the second is of the first's class with chance 19/199: 9.5 of 100 clients on average.
    doubles = [(dealt(Shards(2), 100, seed=seed) == 500).sum() for seed in range(50)]
    assert np.mean(doubles) == pytest.approx(100 * 19 / 199, abs=1.5)


def test_pairs_share_their_classes_exclusively() -> None:
    counts = dealt(PairedShards(2), 10)
    assert (counts > 0).tolist() == np.kron(np.eye(5, dtype=int), np.ones((2, 2))).astype(bool).tolist()
    np.testing.assert_array_equal(counts.sum(axis=0), 5000)
    # The last pair may hold fewer classes; twice as many clients make groups of four.
    last = dealt(PairedShards(2), 4, labelled(100, 100, 100))
    np.testing.assert_array_equal(last > 0, [[1, 1, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]])
    np.testing.assert_array_equal((dealt(PairedShards(2), 20) > 0).sum(axis=0), 4)


@pytest.mark.slow
@pytest.mark.parametrize(("low", "high", "least", "most"), [(1 / 20, 1 / 2, 250, 2499), (1 / 20, 1.0, 250, 4999)])
def test_the_first_of_a_pair_gets_a_uniform_part(low, high, least, most) -> None:
    rng = np.random.default_rng(0)
    firsts = np.concatenate([np.diagonal(dealt(PairedShards(1, low, high), 20, seed=rng)[::2]) for _ in range(60)])
    assert firsts.min() >= least
    assert firsts.max() <= most
    assert firsts.mean() == pytest.approx((least + most) / 2, rel=0.06)
    assert firsts.std() == pytest.approx((most - least) / np.sqrt(12), rel=0.08)


def test_ag_news_is_shared_by_two_groups_of_five() -> None:
    # floor(10 * 2 / 4) = 5 holders; each but the last gets from a tenth of the equal part of 600 up to just below it.
    labels, rng = labelled(*[3000] * 4), np.random.default_rng(0)
    splits = [dealt(PairedShards(2), 10, labels, rng) for _ in range(40)]
    for counts in splits:
        np.testing.assert_array_equal(counts > 0, np.repeat([[1, 1, 0, 0], [0, 0, 1, 1]], 5, axis=0))
        np.testing.assert_array_equal(counts.sum(axis=0), 3000)
    firsts = np.concatenate([counts[[0, 1, 2, 3]][:, :2].ravel() for counts in splits])
    assert firsts.min() >= 60
    assert firsts.max() <= 599
    assert firsts.mean() == pytest.approx((60 + 599) / 2, rel=0.06)
    assert len(dealt(PairedShards(2, high=0.625), 10, labels, rng)) == 10, "the largest that five can all have"


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_client_and_label_gets_the_largest_equal_number(k: int, seed: int) -> None:
    sizes = np.arange(500, 1500, 100)
    counts = dealt(Sparsity(k), 10, labelled(*sizes), seed)
    holders = (counts > 0).sum(axis=0)
    assert np.all((counts > 0).sum(axis=1) == k)
    (quota,) = np.unique(counts[counts > 0])
    assert quota == min(size // held for size, held in zip(sizes, holders, strict=True) if held)


@pytest.mark.slow
def test_labels_are_drawn_uniformly_for_the_target_too() -> None:
    holds = sum((dealt(Sparsity(3), 4, CIFAR_LABELS[::50], seed) > 0).astype(int) for seed in range(600))
    # Each label with chance 0.3: 180 of 600, standard deviation 11.
    np.testing.assert_allclose(holds, 180, atol=45)


@pytest.mark.slow
def test_a_target_is_drawn_again_only_where_a_label_of_it_has_no_holder() -> None:
    again = 0
    for seed in range(60):
        plain, covered = (dealt(rule, 5, seed=seed) > 0 for rule in (Sparsity(3), Sparsity(3, covered=True)))
        held = plain[:-1].any(axis=0)
        np.testing.assert_array_equal(plain[:-1], covered[:-1])
        assert covered[-1].sum() == 3
        assert not (covered[-1] & ~held).any()
        if not (plain[-1] & ~held).any():
            np.testing.assert_array_equal(plain[-1], covered[-1])
        again += (plain[-1] & ~held).any()
    # A label has no holder with chance 0.7^4 = 0.24: well over a quarter of all targets have such a label.
    assert 15 < again < 45


# Random parts of the same labels.


def test_iid_parts_are_of_one_size_and_their_mixes_those_of_drawing_without_replacement() -> None:
    labels = labelled(*[1000] * 10)
    assert dealt(IID(), 10, labels[:1003]).sum(axis=1).tolist() == [101] * 3 + [100] * 7
    counts = dealt(IID(), 20, labels)
    deviation = np.sqrt(50 * 0.9 * (10_000 - 500) / 9_999)  # hypergeometric: 500 of 10,000, of which a tenth in a class
    assert counts.std() == pytest.approx(deviation, rel=0.15)
    assert abs(counts - 50).max() < 5 * deviation


def test_a_stratified_draw_has_every_class_by_its_share() -> None:
    labels = labelled(70, 20, 10)
    for size in (1, 7, 10, 33, 100):
        drawn = stratified(labels, size, np.random.default_rng(size))
        counts, share = np.bincount(labels[drawn], minlength=3), np.array([0.7, 0.2, 0.1]) * size
        assert counts.sum() == len(set(drawn.tolist())) == size
        assert (abs(counts - share) < 1).all()
        assert (np.diff(drawn) > 0).all()
    for size in (0, 101):
        with pytest.raises(ArgumentError, match="rows: must be from 1 to the number of samples, 100"):
            stratified(labels, size, np.random.default_rng(0))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("unique", [1, 2, 3, 4, 6])
def test_every_emnist_setting_of_the_paper(share: float, unique: int) -> None:
    counts = dealt(IIDAndExclusive(share, unique, 2400), 10, labelled(*[2400] * 47))
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


def test_exclusive_labels_at_the_limits() -> None:
    for unique in (2, 5, 10):  # CIFAR-100 has enough of a class for two exclusive labels or more
        assert len(dealt(IIDAndExclusive(0.3, unique, 1000), 10, labelled(*[500] * 100))) == 10
    # IID clients follow the remaining samples: mean 2500, 1250, 1250 and a standard deviation of about 20.
    counts = dealt(IIDAndExclusive(0.0, 1, 5000), 2, labelled(6000, 3000, 3000))
    np.testing.assert_allclose(counts, [[2500, 1250, 1250]] * 2, atol=100)
    # Samples that don't divide evenly go to the first labels.
    assert sorted(dealt(IIDAndExclusive(0.5, 3, 7), 2, labelled(*[10] * 4))[0]) == [0, 2, 2, 3]
    counts = dealt(IIDAndExclusive(1.0, 2, 20), 2, labelled(*[10] * 4))
    np.testing.assert_array_equal(counts.sum(axis=0), 10)
    np.testing.assert_array_equal((counts > 0).sum(axis=0), 1)


# One label missing: sketch and cartoon of PACS, 5,683 pictures by label (FedPALS).
PACS = labelled(1050, 1084, 996, 672, 1033, 333, 515)


def test_pacs_is_divided_as_in_the_authors_code() -> None:
    # Labels 3 to 6: 2,553 samples, 851 each. Client 0 has half of labels 0 and 1 (525 + 542), of its 1,918 a tenth;
    # client 1 half of 0 and 2 (525 + 498); client 2 half of 1 and 2 (542 + 498).
    counts = dealt(OneLabelMissing(), 3, PACS)
    assert counts.sum(axis=1).tolist() == [191, 1874, 1891]
    assert counts[1:, :3].tolist() == [[525, 0, 498], [0, 542, 498]]
    assert counts[0, 2] == 0


def test_the_small_client_keeps_a_uniform_draw_of_what_it_had() -> None:
    rng = np.random.default_rng(0)
    mean = np.mean([dealt(OneLabelMissing(), 3, PACS, rng)[0] for _ in range(100)], axis=0)
    expected = np.array([525, 542, 0, *np.array([672, 1033, 333, 515]) / 3]) * 191 / 1918
    np.testing.assert_allclose(mean, expected, atol=2.2)  # four standard errors of a mean of 100


def test_the_other_labels_are_pooled_and_dealt() -> None:
    rng = np.random.default_rng(0)
    draws = np.stack([dealt(OneLabelMissing(1.0), 3, PACS, rng) for _ in range(60)])
    np.testing.assert_array_equal(draws.sum(axis=1), np.bincount(PACS)[None].repeat(60, axis=0))
    np.testing.assert_array_equal(draws[:, :, 3:].sum(axis=2), 851)
    np.testing.assert_allclose(draws[:, :, 4].mean(axis=0), 1033 / 3, atol=8)
    # Hypergeometric: 851 of 2,553 drawn, 1,033 of them of this label.
    assert draws[:, 0, 4].var() == pytest.approx(851 * (1033 / 2553) * (1520 / 2553) * (1702 / 2552), rel=0.6)
