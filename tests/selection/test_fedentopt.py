from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.partition import DirichletByClass, Quantity
from fedskew.selection import FedEntOpt, Uniform

CIFAR_LABELS = np.repeat(np.arange(10), 5000)


def buffered(clients: np.ndarray):
    """The state in which these clients can't be chosen."""
    return replace(FedEntOpt().init(np.ones((1, 1))), buffer=clients)


def entropy(counts) -> float:
    total = math.fsum(counts)
    return -math.fsum(n / total * math.log2(n / total) for n in counts if n > 0) if total else 0.0


def algorithm_1(counts, buffer, capacity, size, first) -> tuple[list[int], list[int]]:
    """FedEntOpt's Algorithm 1, line by line: (cohort, buffer)."""
    buffer, cohort, allowed = list(buffer), [], set(range(len(counts)))
    pooled = [0.0] * len(counts[0])
    for _ in range(size):
        allowed -= set(buffer)
        allowed -= set(cohort)  # says nothing new unless the capacity is 0
        if cohort:
            value = {a: entropy([x + y for x, y in zip(pooled, counts[a], strict=True)]) for a in allowed}
            chosen = min(a for a in allowed if value[a] >= max(value.values()) - 1e-12)
        else:
            chosen = first
        if capacity:
            if len(buffer) >= capacity:
                buffer.pop(0)
            buffer.append(chosen)
        pooled = [x + y for x, y in zip(pooled, counts[chosen], strict=True)]
        cohort.append(chosen)
    return cohort, buffer


def split_counts(rule, seed: int, clients: int = 100) -> np.ndarray:
    split = rule.split(CIFAR_LABELS, clients, np.random.default_rng(seed))
    return np.stack([np.bincount(CIFAR_LABELS[held], minlength=10) for held in split])


def play(selection, counts: np.ndarray, rounds: int, size: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """The entropy of each round's cohort, and how often each client took part."""
    state, entropies, took_part = selection.init(counts), [], np.zeros(len(counts), dtype=int)
    for round in range(rounds):
        cohort, state = selection.select(state, counts, size, np.random.default_rng(round))
        entropies.append(entropy(counts[cohort].sum(axis=0)))
        took_part[cohort] += 1
    return np.array(entropies), took_part


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_is_algorithm_1_round_after_round(data) -> None:
    clients = data.draw(st.integers(1, 9))
    classes = data.draw(st.integers(1, 4))
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 6), min_size=classes, max_size=classes), min_size=clients, max_size=clients)
    )
    capacity = data.draw(st.integers(0, clients - 1))
    size = data.draw(st.integers(1, clients - capacity))
    selection = FedEntOpt(buffer=capacity / clients)
    state, buffer = selection.init(counts), []
    for round in range(4):
        cohort, state = selection.select(state, counts, size, np.random.default_rng(round))
        expected, buffer = algorithm_1(counts, buffer, capacity, size, first=cohort[0])
        assert cohort.tolist() == expected
        assert state.buffer.tolist() == buffer


@pytest.mark.parametrize("scale", [1, 0.37, 1e-6, 1e9])
def test_the_vectorised_entropy_chooses_as_the_literal_one_on_a_real_split(scale: float) -> None:
    counts = split_counts(DirichletByClass(0.1), 0) * scale
    selection, buffer = FedEntOpt(0.5), []
    state = selection.init(counts)
    for round in range(12):
        cohort, state = selection.select(state, counts, 10, np.random.default_rng(round))
        expected, buffer = algorithm_1(counts.tolist(), buffer, 50, 10, first=cohort[0])
        assert cohort.tolist() == expected
    assert state.buffer.tolist() == buffer


def test_raw_counts_are_summed_so_large_clients_weigh_more() -> None:
    # After (8, 0) the small client makes (8, 1), the large one (8, 20), which is more even; (8, 1000) is not.
    counts = [[8, 0], [0, 1], [0, 20], [0, 1000]]
    cohort, _ = FedEntOpt(0).select(FedEntOpt(0).init(counts), counts, 2, np.random.default_rng(0), first=0)
    assert cohort.tolist() == [0, 2]


def test_ties_go_to_the_lowest_id_although_rounding_differs() -> None:
    # Clients 1 to 5 are permutations of each other over labels that client 0 does not hold.
    counts = [[9, 0, 0, 0], [0, 1, 3, 7], [0, 7, 3, 1], [0, 3, 1, 7], [0, 7, 1, 3], [0, 1, 7, 3]]
    cohort, _ = FedEntOpt(0).select(FedEntOpt(0).init(counts), counts, 2, np.random.default_rng(0), first=0)
    assert cohort.tolist() == [0, 1]


def test_those_who_took_part_stay_out_while_the_buffer_remembers_them() -> None:
    counts = np.ones((6, 2))
    selection = FedEntOpt(buffer=4 / 6)
    state = buffered(np.array([0, 1, 2, 3]))
    cohort, state = selection.select(state, counts, 2, np.random.default_rng(0))
    assert sorted(cohort) == [4, 5]
    assert state.buffer.tolist() == [2, 3, *cohort]
    # 0 and 1 were dropped during that round; they are back in this one.
    cohort, state = selection.select(state, counts, 2, np.random.default_rng(0))
    assert sorted(cohort) == [0, 1]


def test_nobody_is_chosen_twice_in_a_round_though_the_buffer_is_smaller_than_the_cohort() -> None:
    counts = np.ones((5, 2))
    cohort, state = FedEntOpt(0.2).select(FedEntOpt(0.2).init(counts), counts, 4, np.random.default_rng(0))
    assert len(set(cohort.tolist())) == 4
    assert state.buffer.tolist() == [cohort[-1]]


def test_without_a_buffer_a_fixed_first_client_gives_the_same_cohort_every_round() -> None:
    counts = split_counts(DirichletByClass(0.1), 1)
    selection = FedEntOpt(0)
    state = selection.init(counts)
    cohorts = []
    for round in range(3):
        cohort, state = selection.select(state, counts, 10, np.random.default_rng(round), first=7)
        cohorts.append(cohort.tolist())
        assert len(state.buffer) == 0
    assert cohorts == [cohorts[0]] * 3


def test_a_full_buffer_makes_a_round_robin() -> None:
    counts = split_counts(DirichletByClass(0.1), 0)
    _, took_part = play(FedEntOpt(0.9), counts, 30)
    assert took_part.tolist() == [3] * 100


def test_the_first_client_is_uniform_among_those_allowed() -> None:
    counts = np.ones((10, 2))
    state = buffered(np.array([1, 3, 5, 7, 9]))
    rng = np.random.default_rng(0)
    firsts = np.bincount([FedEntOpt(0.5).select(state, counts, 1, rng)[0][0] for _ in range(2000)], minlength=10)
    assert np.all(firsts[1::2] == 0)
    np.testing.assert_allclose(firsts[::2], 400, atol=90)  # 5 standard deviations


def test_empty_clients_are_legal_and_come_last() -> None:
    counts = [[0, 0], [3, 0], [0, 0], [0, 2]]
    cohort, _ = FedEntOpt(0).select(FedEntOpt(0).init(counts), counts, 4, np.random.default_rng(0), first=1)
    assert cohort.tolist() == [1, 3, 0, 2]
    nobody, _ = FedEntOpt(0).select(FedEntOpt(0).init(np.zeros((3, 2))), np.zeros((3, 2)), 3, np.random.default_rng(0))
    assert sorted(nobody) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_cohorts_of_two_labels_a_client_are_nearly_uniform(seed: int) -> None:
    # FedEntOpt, figure 1: #C = 2, CIFAR-10, 100 clients, 10 a round, buffer 70 %. On average above log2(9) = 3.17 bits.
    counts = split_counts(Quantity(2), seed)
    greedy, _ = play(FedEntOpt(0.7), counts, 100)
    assert greedy.mean() == pytest.approx(3.30, abs=0.02)
    assert greedy.min() > math.log2(9)
    uniform, _ = play(Uniform(), counts, 100)
    assert uniform.mean() == pytest.approx(2.99, abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buffer", "bits", "tolerance", "least", "most"),
    [
        # Figures of an independent script, on one split (uniform cohorts: 2.64 bits). The means over 12 splits here are
        # 3.295, 3.280, 3.259, 3.224, 3.198, 3.170 (uniform: 2.73), with standard deviations of 0.005 to 0.04.
        (0.01, 3.29, 0.02, (0, 2), (38, 60)),
        (0.30, 3.27, 0.02, (0, 2), (20, 26)),
        (0.50, 3.24, 0.03, (0, 2), (15, 19)),
        (0.70, 3.21, 0.03, (2, 5), (12, 14)),
        (0.80, 3.17, 0.05, (4, 7), (10, 12)),
        (0.90, 3.10, 0.12, (10, 10), (10, 10)),
    ],
)
def test_a_larger_buffer_trades_entropy_for_participation(buffer, bits, tolerance, least, most) -> None:
    entropies, took_part = play(FedEntOpt(buffer), split_counts(DirichletByClass(0.1), 0), 100)
    assert entropies.mean() == pytest.approx(bits, abs=tolerance)
    assert least[0] <= took_part.min() <= least[1]
    assert most[0] <= took_part.max() <= most[1]


def test_refuses_a_buffer_that_leaves_too_few_and_names_the_largest_that_works() -> None:
    counts = np.ones((100, 3))
    message = r"buffer: 0.95 keeps 95 of 100 clients out, .* cohort of 10; the largest that works is 0\.9"
    with pytest.raises(ArgumentError, match=message):
        FedEntOpt(0.95).select(FedEntOpt(0.95).init(counts), counts, 10, np.random.default_rng(0))
    with pytest.raises(ArgumentError, match=message):
        FedEntOpt(0.95).check(counts, 10)
    FedEntOpt(0.9).check(counts, 10)
    FedEntOpt(0.9).select(FedEntOpt(0.9).init(counts), counts, 10, np.random.default_rng(0))


def test_refuses_fewer_candidates_than_the_cohort() -> None:
    with pytest.raises(ArgumentError, match="candidates: 9 are fewer than the cohort of 10"):
        FedEntOpt(candidates=9).check(np.ones((100, 2)), 10)


def test_a_share_that_floats_can_not_hold_is_not_rounded_down_by_one() -> None:
    # 0.29 * 100 is 28.999999999999996.
    counts = np.ones((100, 2))
    state = buffered(np.arange(29))
    _, following = FedEntOpt(0.29).select(state, counts, 1, np.random.default_rng(0))
    assert len(following.buffer) == 29


def test_a_choice_among_all_candidates_is_the_choice() -> None:
    counts = split_counts(DirichletByClass(0.1), 0)
    state = buffered(np.arange(50))
    plain, _ = FedEntOpt().select(state, counts, 10, np.random.default_rng(0))
    among_all, _ = FedEntOpt(candidates=50).select(state, counts, 10, np.random.default_rng(0))
    assert among_all.tolist() == plain.tolist()


@pytest.mark.slow
def test_candidates_are_drawn_uniformly_from_those_outside_the_buffer() -> None:
    # As many candidates as are asked: the cohort is the draw. Clients 0 to 4 are out; each of the others is in 2/5.
    counts = np.ones((10, 2))
    state, rng = buffered(np.arange(5)), np.random.default_rng(0)
    selection = FedEntOpt(candidates=2)
    took_part = np.bincount(np.concatenate([selection.select(state, counts, 2, rng)[0] for _ in range(1000)]))
    assert not took_part[:5].any()
    np.testing.assert_allclose(took_part[5:], 400, atol=77)  # 5 standard deviations
    with_first = [selection.select(state, counts, 2, rng, first=7)[0].tolist() for _ in range(1000)]
    assert {first for first, _ in with_first} == {7}
    np.testing.assert_allclose(np.bincount([other for _, other in with_first])[[5, 6, 8, 9]], 250, atol=68)


def test_the_choice_among_candidates_is_greedy() -> None:
    counts = split_counts(DirichletByClass(0.1), 0)
    bits = {}
    for candidates in (10, 30, None):
        entropies, _ = play(FedEntOpt(0, candidates), counts, 50)
        bits[candidates] = entropies.mean()
    uniform, _ = play(Uniform(), counts, 50)
    assert bits[10] == pytest.approx(uniform.mean(), abs=0.1)
    assert bits[10] + 0.3 < bits[30] < bits[None]


def test_refuses_a_first_client_that_the_buffer_keeps_out() -> None:
    with pytest.raises(ArgumentError, match="first: client 2 is in the buffer"):
        FedEntOpt(0.5).select(buffered(np.array([2])), np.ones((4, 2)), 1, np.random.default_rng(0), first=2)
