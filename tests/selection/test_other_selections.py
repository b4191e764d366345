"""Uniform cohorts, Fed-CBS by its probabilities, Seol and Kim's quotas, a recorded list, and a user's function."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from choosing import chosen, played

import fedskew
from common import task
from fedskew.errors import ArgumentError, ConfigError
from fedskew.selection import INDEX, GreedyKL, SeolKim, Uniform

FedCBS, Recorded, Function = (INDEX[name] for name in ("fedcbs", "recorded", "function"))
COUNTS = np.ones((5, 2))


def test_every_cohort_is_equally_likely_whatever_the_label_counts() -> None:
    rng = np.random.default_rng(0)
    seen = Counter(frozenset(Uniform().select(None, COUNTS, 2, rng)[0].tolist()) for _ in range(4000))
    assert set(seen) == set(map(frozenset, itertools.combinations(range(5), 2)))
    # 10 cohorts, 400 each, standard deviation 19.
    assert all(abs(times - 400) < 95 for times in seen.values())
    seconds = np.bincount([Uniform().select(None, COUNTS, 2, rng, first=2)[0][1] for _ in range(4000)], minlength=5)
    assert seconds[2] == 0
    np.testing.assert_allclose(np.delete(seconds, 2), 1000, atol=140)
    assert chosen(Uniform(), COUNTS, 3, seed=4) == chosen(Uniform(), np.diag([9.0] * 5), 3, seed=4)


# Fed-CBS.


def after(cohorts: int, *often: int):
    """The state after so many cohorts, in which each client was chosen so often."""
    return replace(FedCBS().init(np.ones((1, 1))), round=cohorts, chosen=np.array(often))


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
    component, often, k = FedCBS(exploration=2.0), (0, 3, 1, 0), 5

    def probability(cohort: tuple[int, ...]) -> float:
        product = 1.0
        for place, client in enumerate(cohort):
            weights = {}
            for one in set(range(4)) - set(cohort[:place]):
                weights[one] = imbalance(gram, sizes, [*cohort[:place], one], 3) ** -(place + 1.0)
                if place == 0:
                    weights[one] += 2.0 * math.sqrt(3 * math.log(k) / (2 * (1 + often[one])))
            product *= weights[client] / sum(weights.values())
        return product

    cohorts = list(itertools.permutations(range(4), 2))
    wanted = np.array([probability(cohort) for cohort in cohorts])
    assert wanted.sum() == pytest.approx(1)
    seen = drawn(component, counts, 2, after(k - 1, *often))
    found = np.array([seen.count(cohort) for cohort in cohorts]) / len(seen)
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.25 / len(seen)))


@pytest.mark.slow
def test_it_sometimes_finds_the_cohort_that_greedy_selection_misses() -> None:
    # The even cohort is {0, 2, 3}. Client 0 is even by itself, so it comes first. Q({0, 1}) is 1/120 and Q({0, 2}) is
    # 1/24, so of the squares of their inverses 14,400 + 576 + 576 the last two lead there; client 3 or 2 then follows.
    assert sorted(chosen(GreedyKL(), FIGURE, 3)) == [0, 1, 2]
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
    state = after(99, 0, 50, 50, 50, 50, 50)
    first = [cohort[0] for cohort in drawn(FedCBS(), np.tile([3.0, 1.0], (6, 1)), 2, state, times=600)]
    # 1/Q is 1 / (10/16 - 1/2) = 8 for all; the bonus is 10 sqrt(1.5 ln 100 / (1 + T)).
    bonus = 10 * math.sqrt(1.5 * math.log(100))
    share = (8 + bonus) / (8 + bonus + 5 * (8 + bonus / math.sqrt(51)))
    assert first.count(0) / 600 == pytest.approx(share, abs=0.08)


def test_a_client_that_is_even_alone_comes_first_in_every_cohort() -> None:
    counts = np.array([[2.0, 2.0], [3.0, 1.0], [1.0, 3.0], [0.0, 9.0]])
    first, second = map(set, zip(*drawn(FedCBS(), counts, 2, after(999, 500, 0, 0, 0), times=200), strict=True))
    assert (first, second) == ({0}, {1, 2, 3})


def test_the_state_counts_rounds_and_choices() -> None:
    for rounds in range(1, 4):
        cohorts, state = played(FedCBS(), FIGURE, rounds, 2)
        assert state.round == rounds
        np.testing.assert_array_equal(state.chosen, np.bincount(np.ravel(cohorts), minlength=4))


def test_the_order_of_classes_and_the_unit_of_counts_mean_nothing() -> None:
    counts = np.random.default_rng(2).integers(0, 9, (30, 4)).astype(float)
    plain, turned, scaled = (chosen(FedCBS(), given, 6, seed=5) for given in (counts, counts[:, ::-1], 8 * counts))
    assert plain == turned == scaled


def test_clients_without_samples_come_last_at_every_place() -> None:
    counts = np.array([[0.0, 0.0], [1.0, 1.0], [5.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    cohorts = drawn(FedCBS(), counts, 4, after(99, 0, 50, 50, 0, 50), times=60)
    assert {frozenset(cohort[:3]) for cohort in cohorts} == {frozenset({1, 2, 4})}
    assert {cohort[3] for cohort in cohorts} == {0, 3}
    assert chosen(FedCBS(), counts, 2, first=3)[0] == 3  # who is told to come first does
    assert len(chosen(FedCBS(), np.zeros((3, 2)), 2)) == 2


# Seol and Kim.


def quotas(counts, size, threshold=0.0, **options) -> tuple[list[int], list[list[float]]]:
    (cohort,), state = played(SeolKim(threshold), np.array(counts), 1, size, **options)
    return cohort, state.quotas.tolist()


def algorithm_2(counts, size, threshold, first=None) -> tuple[list[int], list[list[float]]]:
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
    return cohort, np.stack(quotas).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_is_algorithm_2(seed: int) -> None:
    rng = np.random.default_rng(seed)
    clients, classes = int(rng.integers(1, 300)), int(rng.integers(1, 7))
    counts = np.floor(rng.dirichlet(np.full(classes, 0.3), clients) * rng.integers(1, 60, (clients, 1)))
    counts[rng.integers(0, clients)] += 1
    size, threshold = int(rng.integers(1, clients + 1)), float(rng.choice([0, 0.01, 0.2]))
    first = None if seed % 3 else int(np.argmax(counts.any(axis=1)))
    assert quotas(counts, size, threshold, first=first) == algorithm_2(counts, size, threshold, first)


# By size: 0 (12), 1 (10), 2 (6), 3 (4). Client 0 gives (8, 4, 0), m = 8. The rarest class is 2: client 1 has none of
# it and is skipped, client 2 joins with min(8 - (8, 4, 0), (2, 1, 3)) = (0, 1, 3), so v = (8, 5, 3), KL 0.108 bits.
# Class 2 is rarest still: client 3 joins with min((0, 3, 5), (0, 0, 4)) = (0, 0, 4), v = (8, 5, 7), 0.026 bits. The
# second scan: class 1 is rarest, client 1 joins with min((0, 3, 1), (4, 6, 0)) = (0, 3, 0), v = (8, 8, 7).
EXAMPLE = [[8, 4, 0], [4, 6, 0], [2, 1, 3], [0, 0, 4]]
GIVEN = [[8, 4, 0], [0, 1, 3], [0, 0, 4], [0, 3, 0]]


@pytest.mark.parametrize(
    ("counts", "size", "options", "cohort", "given"),
    [
        (EXAMPLE, 4, {}, [0, 2, 3, 1], GIVEN),
        (EXAMPLE, 4, {"threshold": 0.2}, [0, 2], GIVEN[:2]),  # even enough
        (EXAMPLE, 4, {"threshold": 0.03}, [0, 2, 3], GIVEN[:3]),
        ([[5, 5], [1, 0], [0, 1]], 3, {"threshold": 0.01}, [0], [[5, 5]]),
        # (5, 5) has all classes at m = 5: whoever joined would train on nothing, even at threshold 0.
        ([[5, 5], [3, 0], [0, 3]], 3, {}, [0], [[5, 5]]),
        ([[9, 0], [2, 1]], 2, {"first": 1}, [1], [[2, 1]]),  # with its own largest class
        ([[0, 9], [2, 1]], 2, {"first": 1}, [1, 0], [[2, 1], [0, 1]]),
    ],
)
def test_quotas_worked_out_by_hand(counts, size, options, cohort, given) -> None:
    assert quotas(counts, size, **options) == (cohort, given)


def test_refuses_a_federation_without_samples() -> None:
    with pytest.raises(ArgumentError, match="counts: client 0, the first of the cohort, holds no sample"):
        quotas(np.zeros((3, 2)), 2)
    with pytest.raises(ArgumentError, match="counts: no client holds a sample"):
        SeolKim().check(np.zeros((3, 2)), 2)


# Cohorts from a recorded list.

SIX = np.arange(12.0).reshape(6, 2)
TASK = task(6, beta=0.5, rounds=5, participation=0.5, batch_size=64)


def cohorts_of(result: fedskew.Result) -> list[list[int]]:
    return [record["cohort"] for record in result.rounds[1:]]


def test_cohorts_come_in_their_order_and_begin_again_and_nothing_is_drawn() -> None:
    recorded = [[3, 0], [5], [1, 2, 4]]
    assert played(Recorded(tuple(map(tuple, recorded))), SIX, 5, 2)[0] == [*recorded, *recorded[:2]]
    rng = np.random.default_rng(1)
    before = rng.bit_generator.state
    Recorded(((0, 1),)).select(Recorded(((0, 1),)).init(SIX), SIX, 2, rng)
    assert rng.bit_generator.state == before


@pytest.mark.parametrize(
    ("cohorts", "says"),
    [
        ((), "cohorts: expected at least one list of client ids"),
        (((0, 1), (2, 6)), r"cohorts\[1\]: names client 6, but client ids are 0 to 5"),
        (((-1, 1),), r"cohorts\[0\]: names client -1"),
        (((0, 1), (2, 3, 2)), r"cohorts\[1\]: names a client twice, \[2, 3, 2\]"),
        (((0, 1), ()), r"cohorts\[1\]: expected client ids, one or more whole numbers"),
        (((0.5,),), r"cohorts\[0\]: expected client ids"),
    ],
)
def test_a_senseless_list_is_refused_before_the_first_round(cohorts, says) -> None:
    with pytest.raises(ArgumentError, match=says):
        Recorded(cohorts).init(SIX)


def test_it_cannot_begin_with_another_client() -> None:
    assert chosen(Recorded(((3, 0),)), SIX, 2, first=3) == [3, 0]
    with pytest.raises(ArgumentError, match="first: the cohort begins with client 3 and can't begin with 0"):
        chosen(Recorded(((3, 0),)), SIX, 2, first=0)


@pytest.mark.slow
def test_a_run_repeats_the_cohorts_of_another_from_its_config_and_when_resumed(tmp_path, interrupt_after) -> None:
    cohorts = cohorts_of(fedskew.simulate(TASK, method="fedentopt"))[:3]
    tree = TASK | {"method": {"selection": {"name": "recorded", "cohorts": cohorts}}}
    interrupt_after(4, tree, tmp_path)
    again = fedskew.simulate(tree, out=tmp_path, resume=True)
    assert cohorts_of(again) == [*cohorts, *cohorts[:2]] == cohorts_of(fedskew.simulate(again.folder / "config.toml"))


# A user's own function as a selection.


def largest(round, counts, size, rng):
    """The largest clients, beginning with another one each round."""
    order = np.argsort(-counts.sum(axis=1), kind="stable")
    return np.roll(order[:size], round)


def by_chance(round, counts, size, rng):
    return rng.choice(len(counts), size, replace=False).tolist()


def too_far(round, counts, size, rng):
    return [0, 99]


def twice(round, counts, size, rng):
    return [1, 1]


def nothing(round, counts, size, rng):
    return None


def rewrites(round, counts, size, rng):
    counts[0] = 0
    return [0]


class Cohorts:
    pass


NOT_A_FUNCTION, NOT_CALLED = 3, Cohorts()


def test_it_is_given_rounds_from_1_and_returns_ids_in_order_of_choice() -> None:
    assert played(Function(largest), SIX, 2, 3)[0] == [[3, 5, 4], [4, 3, 5]]
    assert Function(largest) == Function(f"{__name__}:largest")


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (too_far, ArgumentError, "too_far: names client 99, but client ids are 0 to 5"),
        (twice, ArgumentError, "twice: names a client twice"),
        (nothing, ArgumentError, "nothing: expected client ids, one or more whole numbers, got None"),
        (rewrites, ValueError, "read-only"),
        ("largest", ArgumentError, "function: expected module:name"),
        (f"{__name__}:smallest", ConfigError, "can't be imported"),
        (f"{__name__}:NOT_CALLED", ArgumentError, "is of type Cohorts, not a function"),
        (f"{__name__}:NOT_A_FUNCTION", ConfigError, "is defined in builtins, and a config names what your own"),
        (lambda round, counts, size, rng: [0], ConfigError, "define it at the top level of a module"),
    ],
)
def test_what_is_no_function_and_what_it_returns_that_is_no_cohort_is_refused(function, error, says) -> None:
    counts = SIX.copy()
    with pytest.raises(error, match=says):
        chosen(Function(function), counts, 2)
    assert (counts == SIX).all()


@pytest.mark.slow
@pytest.mark.parametrize("function", [largest, by_chance])
@pytest.mark.parametrize("written", [Function, lambda function: {"name": "function", "function": function}])
def test_a_run_goes_by_it_from_python_and_from_its_config(tmp_path, function, written) -> None:
    tree = TASK | {"training": TASK["training"] | {"rounds": 3}}
    result = fedskew.simulate(tree, method={"selection": written(function)}, out=tmp_path)
    assert f'function = "{__name__}:{function.__name__}"' in (result.folder / "config.toml").read_text()
    assert cohorts_of(fedskew.simulate(result.folder / "config.toml")) == cohorts_of(result)
    if function is largest:
        first, second = cohorts_of(result)[:2]
        assert second == [first[-1], *first[:-1]]
