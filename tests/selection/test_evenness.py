"""The greedy choice that keeps scores between choices, against the one that computes every entropy anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.selection import TIE, even_cohort


def anew(counts: np.ndarray, candidates: np.ndarray, size: int, first: int | None = None) -> list[int]:
    """The definition: at every choice the entropy of everybody's pooled labels, and the lowest id within a tie."""
    cohort: list[int] = []
    pooled = np.zeros(counts.shape[1])
    for turn in range(size):
        if turn == 0 and first is not None:
            chosen = first
        else:
            mixed = counts[candidates] + pooled
            total = mixed.sum(axis=1)
            logs = np.log2(np.maximum(mixed, np.finfo(np.float64).tiny))
            part = np.einsum("ij,ij->i", mixed, logs) / np.where(total > 0, total, 1)
            entropies = np.where(total > 0, np.log2(np.where(total > 0, total, 1)) - part, 0)
            chosen = candidates[np.argmax(entropies >= entropies.max() - TIE)]
        cohort.append(int(chosen))
        candidates = candidates[candidates != chosen]
        pooled += counts[chosen]
    return cohort


def federation(kind: str, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    mixes = rng.dirichlet(np.full(classes, 0.2), clients)
    match kind:
        case "sizes differ":
            return np.floor(mixes * rng.lognormal(4, 1.5, (clients, 1)))
        case "one size":
            return rng.multinomial(50, mixes).astype(float)
        case "two labels each, many alike":
            first, second = rng.integers(0, classes, (2, clients))
            return 25.0 * (np.eye(classes)[first] + np.eye(classes)[second])
        case "noisy":
            return np.maximum(rng.multinomial(50, mixes) + rng.laplace(0, 1, mixes.shape), 0)
        case "one huge, many empty":
            counts = np.floor(mixes * rng.integers(0, 2, (clients, 1)) * 20)
            counts[clients // 2] = 1e7
            return counts
    raise AssertionError(kind)


KINDS = ["sizes differ", "one size", "two labels each, many alike", "noisy", "one huge, many empty"]


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_small_federations_full_of_ties(data) -> None:
    clients, classes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 4), min_size=classes, max_size=classes)
    scale = data.draw(st.sampled_from([1, 0.1, 1e-6, 1e9]))
    counts = np.array(data.draw(st.lists(row, min_size=clients, max_size=clients))) * scale
    candidates = np.array(sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=1))))
    size = data.draw(st.integers(1, len(candidates)))
    first = data.draw(st.none() | st.sampled_from(candidates.tolist()))
    assert even_cohort(counts, candidates, size, first).tolist() == anew(counts, candidates, size, first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.whole_product) for seed in (1, 2))])
@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_choices_among_thousands(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = federation(kind, 3000, 12, rng)
    candidates = np.flatnonzero(rng.random(3000) < 0.7)
    first = int(rng.choice(candidates))
    assert even_cohort(counts, candidates, 200, first).tolist() == anew(counts, candidates, 200, first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_clients_of_which_few_need_a_look(kind: str) -> None:
    # 80,000 clients are three blocks; where sizes differ, one of them is enough for most choices.
    counts = federation(kind, 80_000, 4, np.random.default_rng(0))
    candidates = np.arange(80_000)
    assert even_cohort(counts, candidates, 12).tolist() == anew(counts, candidates, 12)


@pytest.mark.slow
def test_entropies_a_tie_apart_from_each_other() -> None:
    # Beside ten million samples of one client, those of the others change the entropy by about the width of a tie.
    counts = federation("one huge, many empty", 80_000, 10, np.random.default_rng(103))
    assert even_cohort(counts, np.arange(80_000), 100).tolist() == anew(counts, np.arange(80_000), 100)


def test_everybody_alike_is_taken_in_order() -> None:
    assert even_cohort(np.ones((50_000, 3)), np.arange(50_000), 40).tolist() == list(range(40))


def test_all_are_taken_where_all_are_asked() -> None:
    counts = federation("one size", 200, 5, np.random.default_rng(1))
    cohort = even_cohort(counts, np.arange(200), 200)
    assert sorted(cohort.tolist()) == list(range(200))
    assert cohort.tolist() == anew(counts, np.arange(200), 200)


@pytest.mark.parametrize(("missing", "chosen"), [(23, 1), (24, 2)])
def test_a_difference_at_the_width_of_a_tie_is_judged_from_entropies_computed_anew(missing: int, chosen: int) -> None:
    # With (10**7, 0) a client (0, 10**7 - d) has entropy 1 - (2 / ln 2) (d / 4e7)**2 bits: below that of (0, 10**7) by
    # 0.954e-12 for d = 23, a tie, and by 1.039e-12 for d = 24, none.
    counts = np.array([[10**7, 0], [0, 10**7 - missing], [0, 10**7]], dtype=float)
    assert even_cohort(counts, np.arange(3), 2, first=0).tolist() == [0, chosen]
