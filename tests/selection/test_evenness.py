"""The greedy choice of even cohorts, worked out by hand and against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import entropy

from fedskew.selection import FedEntOpt, GreedyKL

TIE = 1e-12


def even_cohort(counts: np.ndarray, candidates: np.ndarray, size: int, first: int | None = None) -> np.ndarray:
    """The choice of two selections among some of the clients; both know the clients by their place."""
    selection = GreedyKL() if first is None else FedEntOpt(0)
    place = None if first is None else int(np.searchsorted(candidates, first))
    seen = counts[candidates]
    return candidates[selection.select(selection.init(seen), seen, size, np.random.default_rng(0), place)[0]]


def by_definition(counts: np.ndarray, candidates: list[int], size: int, first: int | None) -> list[int]:
    cohort: list[int] = []
    while len(cohort) < size:
        pooled = counts[cohort].sum(axis=0)
        left = [first] if first is not None and not cohort else [one for one in candidates if one not in cohort]
        bits = [entropy(pooled + counts[one], base=2) if (pooled + counts[one]).any() else 0.0 for one in left]
        cohort.append(next(one for one, here in zip(left, bits, strict=True) if here >= max(bits) - TIE))
    return cohort


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["few samples", "one size", "noisy", "one huge, many empty"])
def test_every_choice_is_the_definitions(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 7))
    mixes = rng.dirichlet(np.full(classes, 0.2), 40)
    counts = {
        "few samples": np.floor(mixes * 4),
        "one size": rng.multinomial(50, mixes).astype(float),
        "noisy": np.maximum(rng.multinomial(50, mixes) + rng.laplace(0, 1, mixes.shape), 0),
        "one huge, many empty": np.floor(mixes * rng.integers(0, 2, (40, 1)) * 20),
    }[kind]
    counts[7] = 1e7 if kind == "one huge, many empty" else counts[7]
    candidates = np.flatnonzero(rng.random(40) < 0.7)
    first = int(rng.choice(candidates)) if seed % 2 else None
    expected = by_definition(counts, candidates.tolist(), 12, first)
    assert even_cohort(counts, candidates, 12, first).tolist() == expected


def test_many_clients_are_one_pool() -> None:
    counts = np.tile([[1.0, 0.0]], (50_000, 1))
    counts[45_000] = [1, 1]
    counts[49_000] = [0, 1]
    assert even_cohort(counts, np.arange(50_000), 3).tolist() == [45_000, 0, 49_000]


def test_everybody_alike_is_taken_in_order_and_all_where_all_are_wanted() -> None:
    assert GreedyKL().select(None, np.ones((50, 3)), 50, np.random.default_rng(0))[0].tolist() == list(range(50))


@pytest.mark.parametrize(("missing", "chosen"), [(23, 1), (24, 2)])
def test_a_difference_within_the_width_of_a_tie_counts_as_none(missing: int, chosen: int) -> None:
    # With (10**7, 0) a client (0, 10**7 - d) has entropy 1 - (2 / ln 2) (d / 4e7)**2 bits: below that of (0, 10**7) by
    # 0.954e-12 for d = 23, a tie, and by 1.039e-12 for d = 24, none.
    counts = np.array([[10**7, 0], [0, 10**7 - missing], [0, 10**7]], dtype=float)
    assert even_cohort(counts, np.arange(3), 2, first=0).tolist() == [0, chosen]
