"""Fed-CBS: its probabilities by hand, from the Gram matrix, and what it chooses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fedskew.selection import INDEX, GreedyKL

FedCBS = INDEX["fedcbs"]


def after(cohorts: int, chosen: np.ndarray):
    """The state after so many cohorts, in which each client was chosen so often."""
    return replace(FedCBS().init(np.ones((1, 1))), round=cohorts, chosen=chosen)


# The paper's figure 3: six classes, four clients of 30 samples, of whom three are chosen.
FIGURE = np.array([[5.0] * 6, [6, 6, 6, 6, 6, 0], [0, 0, 0, 10, 10, 10], [10, 10, 10, 0, 0, 0]])


def imbalance(gram: np.ndarray, sizes: np.ndarray, cohort: list[int], classes: int) -> float:
    """The paper's QCID from inner products alone; tiny values as the component has them."""
    inner = sum(gram[i, j] for i in cohort for j in cohort)
    return max(inner / sizes[cohort].sum() ** 2 - 1 / classes, 1e-12)


def drawn(component: FedCBS, counts: np.ndarray, size: int, state: object = None, times: int = 4000):
    rng, start = np.random.default_rng(0), state or component.init(counts)
    return [tuple(component.select(start, counts, size, rng)[0].tolist()) for _ in range(times)]


@pytest.mark.slow
def test_ordered_cohorts_have_the_probability_that_the_gram_matrix_gives() -> None:
    counts = np.array([[4.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 0.0, 3.0], [1.0, 1.0, 0.0]])
    gram, sizes = counts @ counts.T, counts.sum(axis=1)
    component, chosen, k = FedCBS(exploration=2.0), np.array([0, 3, 1, 0]), 5
    state = after(k - 1, chosen)

    def probability(cohort: tuple[int, ...]) -> float:
        product = 1.0
        for place, client in enumerate(cohort):
            left = [one for one in range(4) if one not in cohort[:place]]
            weights = []
            for one in left:
                weight = imbalance(gram, sizes, [*cohort[:place], one], 3) ** -(place + 1.0)
                if place == 0:
                    weight += 2.0 * math.sqrt(3 * math.log(k) / (2 * (1 + chosen[one])))
                weights.append(weight)
            product *= weights[left.index(client)] / sum(weights)
        return product

    cohorts = list(itertools.permutations(range(4), 2))
    wanted = np.array([probability(cohort) for cohort in cohorts])
    assert wanted.sum() == pytest.approx(1)
    seen = drawn(component, counts, 2, state)
    found = np.array([seen.count(cohort) for cohort in cohorts]) / len(seen)
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.25 / len(seen)))


@pytest.mark.slow
def test_it_sometimes_finds_the_cohort_that_greedy_selection_misses() -> None:
    # The even cohort is {0, 2, 3}. Client 0 is even by itself, so it comes first. Q({0, 1}) is 1/120 and Q({0, 2}) is
    # 1/24, so of the squares of their inverses 14,400 + 576 + 576 the last two lead there; client 3 or 2 then follows.
    assert sorted(GreedyKL().select(None, FIGURE, 3, np.random.default_rng(0))[0]) == [0, 1, 2]
    seen = drawn(FedCBS(), FIGURE, 3)
    assert sum(set(cohort) == {0, 2, 3} for cohort in seen) / len(seen) == pytest.approx(1152 / 15552, abs=0.015)


def test_a_large_exponent_is_a_greedy_choice_by_squared_distance() -> None:
    counts = np.random.default_rng(1).integers(0, 9, (12, 5)).astype(float)
    (cohort,) = set(drawn(FedCBS(exploration=0.0, exponent=2000.0), counts, 4, times=20))
    pooled = np.zeros(5)
    for place, client in enumerate(cohort):
        left = [one for one in range(12) if one not in cohort[:place]]
        mixes = {one: (pooled + counts[one]) / (pooled + counts[one]).sum() for one in left}
        assert client == min(left, key=lambda one: ((mixes[one] - 0.2) ** 2).sum())
        pooled += counts[client]


def test_who_was_seldom_chosen_comes_first_more_often() -> None:
    counts = np.tile([3.0, 1.0], (6, 1))
    state = after(99, np.array([0, 50, 50, 50, 50, 50]))
    first = [cohort[0] for cohort in drawn(FedCBS(), counts, 2, state, times=600)]
    # 1/Q is 1 / (10/16 - 1/2) = 8 for all; the bonus is 10 sqrt(1.5 ln 100 / (1 + T)).
    bonus = 10 * math.sqrt(1.5 * math.log(100))
    share = (8 + bonus) / (8 + bonus + 5 * (8 + bonus / math.sqrt(51)))
    assert first.count(0) / 600 == pytest.approx(share, abs=0.08)


def test_a_client_that_is_even_alone_comes_first_in_every_cohort() -> None:
    counts = np.array([[2.0, 2.0], [3.0, 1.0], [1.0, 3.0], [0.0, 9.0]])
    state = after(999, np.array([500, 0, 0, 0]))
    assert {cohort[0] for cohort in drawn(FedCBS(), counts, 2, state, times=200)} == {0}
    assert {cohort[1] for cohort in drawn(FedCBS(), counts, 2, state, times=200)} == {1, 2, 3}


def test_the_state_counts_rounds_and_choices() -> None:
    component, state, rng = FedCBS(), FedCBS().init(FIGURE), np.random.default_rng(0)
    total = np.zeros(4)
    for round in range(1, 4):
        cohort, state = component.select(state, FIGURE, 2, rng)
        total[cohort] += 1
        assert state.round == round
        np.testing.assert_array_equal(state.chosen, total)


def test_the_order_of_classes_and_the_unit_of_counts_mean_nothing() -> None:
    counts = np.random.default_rng(2).integers(0, 9, (30, 4)).astype(float)
    start, rngs = FedCBS().init(counts), [np.random.default_rng(5) for _ in range(3)]
    plain, turned, scaled = (
        FedCBS().select(start, given, 6, rng)[0].tolist()
        for given, rng in zip((counts, counts[:, ::-1], 8 * counts), rngs, strict=True)
    )
    assert plain == turned == scaled


def test_clients_without_samples_come_last_at_every_place() -> None:
    counts = np.array([[0.0, 0.0], [1.0, 1.0], [5.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    cohorts = drawn(FedCBS(), counts, 4, after(99, np.array([0, 50, 50, 0, 50])), times=60)
    assert {frozenset(cohort[:3]) for cohort in cohorts} == {frozenset({1, 2, 4})}
    assert {cohort[3] for cohort in cohorts} == {0, 3}
    rng = np.random.default_rng(0)
    assert FedCBS().select(FedCBS().init(counts), counts, 2, rng, first=3)[0][0] == 3  # who is told to come first does
    nobody = np.zeros((3, 2))
    assert len(FedCBS().select(FedCBS().init(nobody), nobody, 2, np.random.default_rng(0))[0]) == 2
