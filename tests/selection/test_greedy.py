"""FedEntOpt and GreedyKL, which choose one client after another so that the cohort's labels are even."""

import math
from dataclasses import replace

import numpy as np
import pytest
from choosing import chosen, entropy, played
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.partition import DirichletByClass, Quantity
from fedskew.selection import INDEX, FedEntOpt, GreedyKL, Uniform

CIFAR_LABELS = np.repeat(np.arange(10), 5000)


def buffered(*clients: int):
    """The state in which these clients can't be chosen."""
    return replace(FedEntOpt().init(np.ones((1, 1))), buffer=np.array(clients, dtype=np.int64))


def algorithm_1(counts, buffer, capacity, size, first) -> tuple[list[int], list[int]]:
    """FedEntOpt's Algorithm 1, line by line: (cohort, buffer). Without a first client that is the most even one."""
    buffer, cohort, allowed = list(buffer), [], set(range(len(counts)))
    pooled = [0.0] * len(counts[0])
    for _ in range(size):
        allowed -= set(buffer)
        allowed -= set(cohort)  # says nothing new unless the capacity is 0
        value = {a: entropy([x + y for x, y in zip(pooled, counts[a], strict=True)]) for a in allowed}
        best = min(a for a in allowed if value[a] >= max(value.values()) - 1e-12)
        chosen = best if cohort or first is None else first
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


DIRICHLET = split_counts(DirichletByClass(0.1), 0)


def assert_is_algorithm_1(counts, capacity: int, size: int, rounds: int) -> None:
    selection, buffer = FedEntOpt(buffer=capacity / len(counts)), []
    state = selection.init(counts)
    for round in range(rounds):
        cohort, state = selection.select(state, counts, size, np.random.default_rng(round))
        expected, buffer = algorithm_1(np.asarray(counts).tolist(), buffer, capacity, size, first=cohort[0])
        assert (cohort.tolist(), state.buffer.tolist()) == (expected, buffer)
    greedy = algorithm_1(np.asarray(counts).tolist(), [], 0, size, None)[0]
    assert chosen(GreedyKL(), counts, size) == chosen(FedEntOpt(0), counts, size, first=greedy[0]) == greedy


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_is_algorithm_1_round_after_round(data) -> None:
    clients, classes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 6), min_size=classes, max_size=classes)
    counts = data.draw(st.lists(row, min_size=clients, max_size=clients))
    capacity = data.draw(st.integers(0, clients - 1))
    assert_is_algorithm_1(counts, capacity, data.draw(st.integers(1, clients - capacity)), 4)


@pytest.mark.parametrize("scale", [1, 0.37, 1e-6, 1e9])
def test_the_vectorised_entropy_chooses_as_the_literal_one_on_a_real_split(scale: float) -> None:
    assert_is_algorithm_1(DIRICHLET * scale, 50, 10, 12)


@pytest.mark.parametrize("kind", ["few samples", "one size", "noisy", "one huge, many empty"])
def test_counts_of_many_kinds_are_chosen_by_the_definition(kind: str) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        mixes = rng.dirichlet(np.full(int(rng.integers(2, 7)), 0.2), 28)
        counts = {
            "few samples": np.floor(mixes * 4),
            "one size": rng.multinomial(50, mixes).astype(float),
            "noisy": np.maximum(rng.multinomial(50, mixes) + rng.laplace(0, 1, mixes.shape), 0),
            "one huge, many empty": np.floor(mixes * rng.integers(0, 2, (28, 1)) * 20),
        }[kind]
        counts[7] = 1e7 if kind == "one huge, many empty" else counts[7]
        assert_is_algorithm_1(counts, 0, 12, 1)


# With (10**7, 0) a client (0, 10**7 - d) has entropy 1 - (2 / ln 2) (d / 4e7)**2 bits: below that of (0, 10**7) by
# 0.954e-12 for d = 23, a tie, and by 1.039e-12 for d = 24, none.
NEAR_TIES = {missing: [[10**7, 0], [0, 10**7 - missing], [0, 10**7]] for missing in (23, 24)}


@pytest.mark.parametrize(
    ("counts", "options", "cohort"),
    [
        # Raw counts: after (8, 0) the small client makes (8, 1), the large one (8, 20), more even; (8, 1000) is not.
        ([[8, 0], [0, 1], [0, 20], [0, 1000]], {"first": 0}, [0, 2]),
        # Ties go to the lowest id although rounding differs: permutations of each other over labels that 0 lacks.
        ([[9, 0, 0, 0], [0, 1, 3, 7], [0, 7, 3, 1], [0, 3, 1, 7], [0, 7, 1, 3], [0, 1, 7, 3]], {"first": 0}, [0, 1]),
        (NEAR_TIES[23], {"first": 0}, [0, 1]),
        (NEAR_TIES[24], {"first": 0}, [0, 2]),
        ([[0, 0], [3, 0], [0, 0], [0, 2]], {"first": 1}, [1, 3, 0, 2]),  # empty clients are legal and come last
        ([[0, 0], [0, 0], [0, 0]], {}, [0, 1, 2]),
        # KL to uniform over 3 classes: (4, 1, 1) 0.33 bits, (2, 3, 2) 0.03, empty and (9, 0, 0) log2 3 = 1.58.
        ([[0, 0, 0], [9, 0, 0], [4, 1, 1], [2, 3, 2]], {}, [3]),
        # First (50, 50), even. Then raw: (50, 50) + (1, 0) is nearer to even than (50, 50) + (40, 60). Normalised:
        # (.5, .5) + (1, 0) = (1.5, .5) is further than (.5, .5) + (.4, .6) = (.9, 1.1).
        ([[50, 50], [1, 0], [40, 60]], {}, [0, 1]),
        ([[50, 50], [1, 0], [40, 60]], {"normalise": True}, [0, 2]),
        # (3, 1) first. With (0, 5) it is (.75, 1.25), more even than (.75, .25) with nobody.
        ([[0, 0], [3, 1], [0, 5]], {"normalise": True}, [1, 2, 0]),
    ],
)
def test_worked_out_by_hand(counts, options, cohort) -> None:
    selection = FedEntOpt(0) if "first" in options else GreedyKL(**options)
    first = options.get("first")
    assert chosen(selection, np.array(counts, dtype=float), len(cohort), first=first) == cohort


def test_many_clients_are_one_pool_and_everybody_alike_is_taken_in_order() -> None:
    counts = np.tile([[1.0, 0.0]], (50_000, 1))
    counts[45_000] = [1, 1]
    counts[49_000] = [0, 1]
    assert chosen(GreedyKL(), counts, 3) == [45_000, 0, 49_000]
    assert chosen(GreedyKL(), np.ones((50, 3)), 50) == list(range(50))


# FedEntOpt's buffer.


def test_those_who_took_part_stay_out_while_the_buffer_remembers_them() -> None:
    counts, selection = np.ones((6, 2)), FedEntOpt(buffer=4 / 6)
    cohort, state = selection.select(buffered(0, 1, 2, 3), counts, 2, np.random.default_rng(0))
    assert sorted(cohort) == [4, 5]
    assert state.buffer.tolist() == [2, 3, *cohort]
    # 0 and 1 were dropped during that round; they are back in this one.
    assert sorted(chosen(selection, counts, 2, state=state)) == [0, 1]
    # Nobody is chosen twice in a round though the buffer is smaller than the cohort.
    (cohort,), state = played(FedEntOpt(0.2), np.ones((5, 2)), 1, 4)
    assert len(set(cohort)) == 4
    assert state.buffer.tolist() == [cohort[-1]]
    # A share that floats can't hold is not rounded down by one: 0.29 * 100 is 28.999999999999996.
    _, state = FedEntOpt(0.29).select(buffered(*range(29)), np.ones((100, 2)), 1, np.random.default_rng(0))
    assert len(state.buffer) == 29


def test_without_a_buffer_a_fixed_first_client_gives_the_same_cohort_every_round_and_a_full_one_a_round_robin() -> None:
    cohorts, state = played(FedEntOpt(0), DIRICHLET, 3, first=7)
    assert cohorts == [cohorts[0]] * 3
    assert len(state.buffer) == 0
    assert np.bincount(np.ravel(played(FedEntOpt(0.9), DIRICHLET, 30)[0])).tolist() == [3] * 100


def test_the_first_client_is_uniform_among_those_allowed() -> None:
    state, rng = buffered(1, 3, 5, 7, 9), np.random.default_rng(0)
    draws = [FedEntOpt(0.5).select(state, np.ones((10, 2)), 1, rng)[0][0] for _ in range(2000)]
    firsts = np.bincount(draws, minlength=10)
    assert np.all(firsts[1::2] == 0)
    np.testing.assert_allclose(firsts[::2], 400, atol=90)  # 5 standard deviations


def bits(selection, counts: np.ndarray, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The entropy of each round's cohort, and how often each client took part."""
    cohorts, _ = played(selection, counts, rounds)
    entropies = [entropy(counts[cohort].sum(axis=0)) for cohort in cohorts]
    return np.array(entropies), np.bincount(np.ravel(cohorts), minlength=len(counts))


@pytest.mark.parametrize("seed", range(3))
def test_cohorts_of_two_labels_a_client_are_nearly_uniform(seed: int) -> None:
    # FedEntOpt, figure 1: #C = 2, CIFAR-10, 100 clients, 10 a round, buffer 70 %. On average above log2(9) = 3.17 bits.
    counts = split_counts(Quantity(2), seed)
    greedy, _ = bits(FedEntOpt(0.7), counts, 100)
    assert greedy.mean() == pytest.approx(3.30, abs=0.02)
    assert greedy.min() > math.log2(9)
    assert bits(Uniform(), counts, 100)[0].mean() == pytest.approx(2.99, abs=0.15)


def test_refuses_a_buffer_that_leaves_too_few_and_names_the_largest_that_works() -> None:
    counts = np.ones((100, 3))
    message = r"buffer: 0.95 keeps 95 of 100 clients out, .* cohort of 10; the largest that works is 0\.9"
    for ask in (lambda: chosen(FedEntOpt(0.95), counts, 10), lambda: FedEntOpt(0.95).check(counts, 10)):
        with pytest.raises(ArgumentError, match=message):
            ask()
    FedEntOpt(0.9).check(counts, 10)
    assert len(chosen(FedEntOpt(0.9), counts, 10)) == 10
    with pytest.raises(ArgumentError, match="first: client 2 is in the buffer"):
        chosen(FedEntOpt(0.5), np.ones((4, 2)), 1, state=buffered(2), first=2)
    with pytest.raises(ArgumentError, match="candidates: 9 are fewer than the cohort of 10"):
        FedEntOpt(candidates=9).check(counts, 10)


@pytest.mark.slow
def test_candidates_are_drawn_uniformly_from_those_outside_the_buffer() -> None:
    # As many candidates as are asked: the cohort is the draw. Clients 0 to 4 are out; each of the others is in 2/5.
    state, rng, selection = buffered(*range(5)), np.random.default_rng(0), FedEntOpt(candidates=2)
    counts = np.ones((10, 2))
    took_part = np.bincount(np.concatenate([selection.select(state, counts, 2, rng)[0] for _ in range(1000)]))
    assert not took_part[:5].any()
    np.testing.assert_allclose(took_part[5:], 400, atol=77)  # 5 standard deviations
    with_first = [selection.select(state, counts, 2, rng, first=7)[0].tolist() for _ in range(1000)]
    assert {first for first, _ in with_first} == {7}
    np.testing.assert_allclose(np.bincount([other for _, other in with_first])[[5, 6, 8, 9]], 250, atol=68)


def test_the_choice_among_candidates_is_greedy_and_among_all_the_choice() -> None:
    found = {candidates: bits(FedEntOpt(0, candidates), DIRICHLET, 50)[0].mean() for candidates in (10, 30, None)}
    assert found[10] == pytest.approx(bits(Uniform(), DIRICHLET, 50)[0].mean(), abs=0.1)
    assert found[10] + 0.3 < found[30] < found[None]
    state = buffered(*range(50))
    plain, among_all = (chosen(FedEntOpt(candidates=many), DIRICHLET, 10, state=state) for many in (None, 50))
    assert among_all == plain


# ---- towards a target


def divergence(counts, mix) -> float:
    """KL of pooled counts to a mix, in bits; infinite of nothing."""
    total = math.fsum(counts)
    pairs = zip(counts, mix, strict=True)
    return math.fsum(n / total * math.log2(n / total / q) for n, q in pairs if n) if total else math.inf


@pytest.mark.parametrize("mix", [[0.1] * 10, [0.5, 0.1, 0.1, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01], range(1, 11)])
def test_towards_a_target_each_next_client_brings_the_cohort_nearest_to_it(mix) -> None:
    mix = np.array(mix, dtype=float) / sum(mix)
    cohort = chosen(INDEX["fedentopt_target"](0), DIRICHLET, 8, target=mix)
    pooled = DIRICHLET[cohort[0]].astype(float)
    for place in range(1, 8):
        others = sorted(set(range(100)) - set(cohort[:place]))
        assert cohort[place] == min(others, key=lambda client: divergence(pooled + DIRICHLET[client], mix))
        pooled += DIRICHLET[cohort[place]]
    even = chosen(FedEntOpt(0), DIRICHLET, 8)
    assert divergence(pooled, mix) <= divergence(DIRICHLET[even].sum(axis=0), mix)
    assert (cohort == even) == (mix.max() < 0.11)


def test_without_a_mix_yet_cohorts_are_even_and_one_that_a_target_lacks_is_the_last_resort() -> None:
    assert chosen(INDEX["fedentopt_target"](0.2), DIRICHLET, 6) == chosen(FedEntOpt(0.2), DIRICHLET, 6)
    counts = np.array([[50, 0, 0], [0, 0, 90], [0, 0, 0], [40, 10, 0], [0, 50, 1]], dtype=float)
    # (50, 50, 1) is 0.03 bits from (1/2, 1/2, 0), in spite of the stray sample, (90, 10, 0) 0.53 and (90, 60, 1) 0.06.
    # An empty client changes nothing, and one that holds only what the target lacks comes last.
    assert chosen(INDEX["fedentopt_target"](0), counts, 5, first=0, target=np.array([1, 1, 0])) == [0, 4, 2, 3, 1]
    assert chosen(INDEX["fedentopt_target"](0), counts[1:3], 2, first=1, target=np.array([1, 1, 0])) == [1, 0]
    with pytest.raises(ArgumentError, match="target"):
        chosen(INDEX["fedentopt_target"](0), counts, 2, target=np.array([1, 1]))
