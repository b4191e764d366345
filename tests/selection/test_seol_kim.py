from __future__ import annotations

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.selection import SeolKim


def choose(counts, size, threshold=0.0, **options) -> tuple[list[int], list[list[float]]]:
    selection = SeolKim(threshold)
    cohort, state = selection.select(selection.init(counts), counts, size, np.random.default_rng(0), **options)
    return cohort.tolist(), state.quotas.tolist()


def algorithm_2(counts, size, threshold, first=None) -> tuple[list[int], np.ndarray]:
    """Seol and Kim's Algorithm 2, one client after another."""
    by_size = sorted(range(len(counts)), key=lambda client: -counts[client].sum())
    cohort = [by_size[0] if first is None else first]
    used = counts[cohort[0]]
    quotas, most = [used], used.max()

    def enough() -> bool:
        shares = used[used > 0] / used.sum()
        return len(cohort) == size or np.log2(len(used)) + (shares * np.log2(shares)).sum() < threshold

    joined = True
    while joined and not enough():
        joined = False
        for client in [client for client in by_size if client not in cohort]:
            rarest = np.argmax(used <= used.min() + 1e-12)
            quota = np.minimum(most - used, counts[client])
            if counts[client, rarest] > 0 and quota.any() and not enough():
                cohort.append(client)
                quotas.append(quota)
                used, joined = used + quota, True
    return cohort, np.stack(quotas)


@pytest.mark.parametrize("seed", range(40))
def test_is_algorithm_2(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients, classes = int(rng.integers(1, 300)), int(rng.integers(1, 7))
    counts = np.floor(rng.dirichlet(np.full(classes, 0.3), clients) * rng.integers(1, 60, (clients, 1)))
    counts[rng.integers(0, clients)] += 1
    size, threshold = int(rng.integers(1, clients + 1)), float(rng.choice([0, 0.01, 0.2]))
    first = None if seed % 3 else int(np.argmax(counts.any(axis=1)))
    cohort, quotas = choose(counts, size, threshold, first=first)
    expected, expected_quotas = algorithm_2(counts, size, threshold, first)
    assert cohort == expected
    np.testing.assert_array_equal(quotas, expected_quotas)


def test_a_worked_example() -> None:
    # By size: 0 (12), 1 (10), 2 (6), 3 (4). Client 0 gives (8, 4, 0), m = 8. The rarest class is 2: client 1 has none
    # of it and is skipped, client 2 joins with min(8 - (8, 4, 0), (2, 1, 3)) = (0, 1, 3), so v = (8, 5, 3). Class 2 is
    # rarest still: client 3 joins with min((0, 3, 5), (0, 0, 4)) = (0, 0, 4), v = (8, 5, 7). The second scan: class 1
    # is rarest, client 1 joins with min((0, 3, 1), (4, 6, 0)) = (0, 3, 0), v = (8, 8, 7).
    counts = [[8, 4, 0], [4, 6, 0], [2, 1, 3], [0, 0, 4]]
    cohort, quotas = choose(counts, 4)
    assert cohort == [0, 2, 3, 1]
    assert quotas == [[8, 4, 0], [0, 1, 3], [0, 0, 4], [0, 3, 0]]


def test_stops_when_the_labels_in_use_are_even_enough() -> None:
    # After clients 0 and 2: (8, 5, 3), KL = log2 3 - H = 1.585 - 1.477 = 0.108 bits; after 3: (8, 5, 7), 0.026.
    counts = [[8, 4, 0], [4, 6, 0], [2, 1, 3], [0, 0, 4]]
    assert choose(counts, 4, threshold=0.2)[0] == [0, 2]
    assert choose(counts, 4, threshold=0.03)[0] == [0, 2, 3]
    assert choose([[5, 5], [1, 0], [0, 1]], 3, threshold=0.01)[0] == [0]


def test_a_client_whose_quota_would_be_empty_is_not_taken() -> None:
    # (5, 5) has all classes at m = 5: whoever joined would train on nothing, even at threshold 0.
    assert choose([[5, 5], [3, 0], [0, 3]], 3) == ([0], [[5, 5]])


def test_begins_with_the_given_client_and_its_own_largest_class() -> None:
    assert choose([[9, 0], [2, 1]], 2, first=1) == ([1], [[2, 1]])
    assert choose([[0, 9], [2, 1]], 2, first=1) == ([1, 0], [[2, 1], [0, 1]])


def test_refuses_a_federation_without_samples() -> None:
    with pytest.raises(ArgumentError, match="counts: client 0, the first of the cohort, holds no sample"):
        choose(np.zeros((3, 2)), 2)
    with pytest.raises(ArgumentError, match="counts: no client holds a sample"):
        SeolKim().check(np.zeros((3, 2)), 2)
