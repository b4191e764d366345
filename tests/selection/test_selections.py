from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

import fedskew
from fedskew.errors import ArgumentError, ConfigError
from fedskew.selection import INDEX, FedEntOpt, GreedyKL, SeolKim, Uniform

COUNTS = np.ones((5, 2))


def test_every_cohort_is_equally_likely() -> None:
    rng = np.random.default_rng(0)
    seen = Counter(frozenset(Uniform().select(None, COUNTS, 2, rng)[0].tolist()) for _ in range(4000))
    assert set(seen) == set(map(frozenset, itertools.combinations(range(5), 2)))
    # 10 cohorts, 400 each, standard deviation 19.
    assert all(abs(times - 400) < 95 for times in seen.values())


def test_after_a_given_first_client_the_others_are_equally_likely() -> None:
    rng = np.random.default_rng(0)
    seconds = np.bincount([Uniform().select(None, COUNTS, 2, rng, first=2)[0][1] for _ in range(4000)], minlength=5)
    assert seconds[2] == 0
    np.testing.assert_allclose(np.delete(seconds, 2), 1000, atol=140)


def test_label_counts_do_not_matter() -> None:
    ones, _ = Uniform().select(None, COUNTS, 3, np.random.default_rng(4))
    others, _ = Uniform().select(None, np.diag([9.0] * 5), 3, np.random.default_rng(4))
    assert ones.tolist() == others.tolist()


tables = st.integers(1, 4).flatmap(
    lambda classes: st.lists(st.lists(st.integers(0, 9), min_size=classes, max_size=classes), min_size=1, max_size=7)
)


def choose(selection, counts, size, **options) -> list[int]:
    cohort, _ = selection.select(selection.init(counts), counts, size, np.random.default_rng(0), **options)
    return cohort.tolist()


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(counts=tables, data=st.data())
def test_is_fedentopt_without_buffer_from_the_most_even_client(counts, data) -> None:
    size = data.draw(st.integers(1, len(counts)))
    cohort = choose(GreedyKL(), counts, size)
    assert cohort == choose(FedEntOpt(0), counts, size, first=cohort[0])


def test_the_first_client_is_the_nearest_to_uniform() -> None:
    # KL to uniform over 3 classes: (4, 1, 1) 0.33 bits, (2, 3, 2) 0.03, an empty client and (9, 0, 0) log2 3 = 1.58.
    assert choose(GreedyKL(), [[0, 0, 0], [9, 0, 0], [4, 1, 1], [2, 3, 2]], 1) == [3]


def test_normalised_every_client_counts_alike() -> None:
    # First (50, 50), even. Then raw: (50, 50) + (1, 0) is nearer to even than (50, 50) + (40, 60). Normalised:
    # (.5, .5) + (1, 0) = (1.5, .5) is further than (.5, .5) + (.4, .6) = (.9, 1.1).
    counts = [[50, 50], [1, 0], [40, 60]]
    assert choose(GreedyKL(), counts, 2) == [0, 1]
    assert choose(GreedyKL(normalise=True), counts, 2) == [0, 2]


def test_an_empty_client_changes_nothing_when_normalised() -> None:
    # (3, 1) first. With (0, 5) it is (.75, 1.25), more even than (.75, .25) with nobody.
    assert choose(GreedyKL(normalise=True), [[0, 0], [3, 1], [0, 5]], 3) == [1, 2, 0]


# The greedy choice of even cohorts, worked out by hand and against its definition.

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


# Cohorts from a recorded list.

Recorded = INDEX["recorded"]

RECORDED_COUNTS = np.ones((6, 2))
RNG = np.random.default_rng(0)

TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.5, "min_size": 1},
    "model": "logistic",
    "training": {"rounds": 5, "participation": 0.5, "batch_size": 64},
}


def played(selection: Recorded, rounds: int) -> list[list[int]]:
    state, cohorts = selection.init(RECORDED_COUNTS), []
    for _ in range(rounds):
        cohort, state = selection.select(state, RECORDED_COUNTS, 2, RNG)
        assert cohort.dtype == np.int64
        cohorts.append(cohort.tolist())
    return cohorts


def test_cohorts_come_in_their_order_and_begin_again() -> None:
    assert played(Recorded(((3, 0), (5,), (1, 2, 4))), 5) == [[3, 0], [5], [1, 2, 4], [3, 0], [5]]


def test_it_draws_nothing() -> None:
    rng = np.random.default_rng(1)
    before = rng.bit_generator.state
    Recorded(((0, 1),)).select(Recorded(((0, 1),)).init(RECORDED_COUNTS), RECORDED_COUNTS, 2, rng)
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
        Recorded(cohorts).init(RECORDED_COUNTS)


def test_it_cannot_begin_with_another_client() -> None:
    selection = Recorded(((3, 0),))
    assert selection.select(selection.init(RECORDED_COUNTS), RECORDED_COUNTS, 2, RNG, first=3)[0].tolist() == [3, 0]
    with pytest.raises(ArgumentError, match="first: the cohort begins with client 3 and can't begin with 0"):
        selection.select(selection.init(RECORDED_COUNTS), RECORDED_COUNTS, 2, RNG, first=0)


@pytest.mark.slow
def test_a_run_repeats_the_cohorts_of_another_from_its_config_and_when_resumed(tmp_path) -> None:
    earlier = fedskew.simulate(TASK, method="fedentopt")
    cohorts = [record["cohort"] for record in earlier.rounds[1:]]
    selection = {"name": "recorded", "cohorts": cohorts[:3]}

    def stop(record) -> None:
        if record["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate(TASK, method={"selection": selection}, out=tmp_path, progress=stop)
    again = fedskew.simulate(TASK, method={"selection": selection}, out=tmp_path, resume=True)
    assert [record["cohort"] for record in again.rounds[1:]] == [*cohorts[:3], *cohorts[:2]]
    replayed = fedskew.simulate(again.folder / "config.toml")
    assert [record["cohort"] for record in replayed.rounds] == [record["cohort"] for record in again.rounds]


def test_a_client_that_is_not_there_stops_a_run_before_it_begins() -> None:
    with pytest.raises(ArgumentError, match=r"cohorts\[1\]: names client 6"):
        fedskew.simulate(TASK, method={"selection": {"name": "recorded", "cohorts": [[0], [6]]}})


def choose_with_quotas(counts, size, threshold=0.0, **options) -> tuple[list[int], list[list[float]]]:
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
    cohort, quotas = choose_with_quotas(counts, size, threshold, first=first)
    expected, expected_quotas = algorithm_2(counts, size, threshold, first)
    assert cohort == expected
    np.testing.assert_array_equal(quotas, expected_quotas)


def test_a_worked_example() -> None:
    # By size: 0 (12), 1 (10), 2 (6), 3 (4). Client 0 gives (8, 4, 0), m = 8. The rarest class is 2: client 1 has none
    # of it and is skipped, client 2 joins with min(8 - (8, 4, 0), (2, 1, 3)) = (0, 1, 3), so v = (8, 5, 3). Class 2 is
    # rarest still: client 3 joins with min((0, 3, 5), (0, 0, 4)) = (0, 0, 4), v = (8, 5, 7). The second scan: class 1
    # is rarest, client 1 joins with min((0, 3, 1), (4, 6, 0)) = (0, 3, 0), v = (8, 8, 7).
    counts = [[8, 4, 0], [4, 6, 0], [2, 1, 3], [0, 0, 4]]
    cohort, quotas = choose_with_quotas(counts, 4)
    assert cohort == [0, 2, 3, 1]
    assert quotas == [[8, 4, 0], [0, 1, 3], [0, 0, 4], [0, 3, 0]]


def test_stops_when_the_labels_in_use_are_even_enough() -> None:
    # After clients 0 and 2: (8, 5, 3), KL = log2 3 - H = 1.585 - 1.477 = 0.108 bits; after 3: (8, 5, 7), 0.026.
    counts = [[8, 4, 0], [4, 6, 0], [2, 1, 3], [0, 0, 4]]
    assert choose_with_quotas(counts, 4, threshold=0.2)[0] == [0, 2]
    assert choose_with_quotas(counts, 4, threshold=0.03)[0] == [0, 2, 3]
    assert choose_with_quotas([[5, 5], [1, 0], [0, 1]], 3, threshold=0.01)[0] == [0]


def test_a_client_whose_quota_would_be_empty_is_not_taken() -> None:
    # (5, 5) has all classes at m = 5: whoever joined would train on nothing, even at threshold 0.
    assert choose_with_quotas([[5, 5], [3, 0], [0, 3]], 3) == ([0], [[5, 5]])


def test_begins_with_the_given_client_and_its_own_largest_class() -> None:
    assert choose_with_quotas([[9, 0], [2, 1]], 2, first=1) == ([1], [[2, 1]])
    assert choose_with_quotas([[0, 9], [2, 1]], 2, first=1) == ([1, 0], [[2, 1], [0, 1]])


def test_refuses_a_federation_without_samples() -> None:
    with pytest.raises(ArgumentError, match="counts: client 0, the first of the cohort, holds no sample"):
        choose_with_quotas(np.zeros((3, 2)), 2)
    with pytest.raises(ArgumentError, match="counts: no client holds a sample"):
        SeolKim().check(np.zeros((3, 2)), 2)


# A user's own function as a selection.

Function = INDEX["function"]

FUNCTION_COUNTS = np.arange(12.0).reshape(6, 2)


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


NOT_A_FUNCTION = 3


class Cohorts:
    pass


NOT_CALLED = Cohorts()


def test_it_is_given_rounds_from_1_and_returns_ids_in_order_of_choice() -> None:
    selection = Function(largest)
    state = selection.init(FUNCTION_COUNTS)
    for expected in ([3, 5, 4], [4, 3, 5]):
        cohort, state = selection.select(state, FUNCTION_COUNTS, 3, np.random.default_rng(0))
        assert cohort.dtype == np.int64
        assert cohort.tolist() == expected


def test_its_name_and_the_function_are_the_same_selection() -> None:
    assert Function(largest) == Function(f"{__name__}:largest")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (too_far, "too_far: names client 99, but client ids are 0 to 5"),
        (twice, "twice: names a client twice"),
        (nothing, "nothing: expected client ids, one or more whole numbers, got None"),
    ],
)
def test_what_is_no_cohort_is_refused_by_the_function_s_name(function, says) -> None:
    selection = Function(function)
    with pytest.raises(ArgumentError, match=says):
        selection.select(selection.init(FUNCTION_COUNTS), FUNCTION_COUNTS, 2, np.random.default_rng(0))


def test_it_cannot_change_the_label_counts() -> None:
    counts = FUNCTION_COUNTS.copy()
    with pytest.raises(ValueError, match="read-only"):
        Function(rewrites).select(Function(rewrites).init(counts), counts, 2, np.random.default_rng(0))
    assert (counts == FUNCTION_COUNTS).all()


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        ("largest", ArgumentError, "function: expected module:name"),
        (f"{__name__}:smallest", ConfigError, "can't be imported"),
        (f"{__name__}:NOT_CALLED", ArgumentError, "is of type Cohorts, not a function"),
        (
            f"{__name__}:NOT_A_FUNCTION",
            ConfigError,
            "is defined in builtins, and a config names what your own files define",
        ),
    ],
)
def test_what_is_no_function_is_refused(function, error, says) -> None:
    with pytest.raises(error, match=says):
        Function(function)


def test_a_function_inside_another_can_not_be_named_in_a_config() -> None:
    with pytest.raises(ConfigError, match="define it at the top level of a module"):
        Function(lambda round, counts, size, rng: [0])


@pytest.mark.slow
@pytest.mark.parametrize("function", [largest, by_chance])
@pytest.mark.parametrize("written", [Function, lambda function: {"name": "function", "function": function}])
def test_a_run_goes_by_it_from_python_and_from_its_config(tmp_path, function, written) -> None:
    tree = TASK | {"training": TASK["training"] | {"rounds": 3}}
    result = fedskew.simulate(tree, method={"selection": written(function)}, out=tmp_path)
    assert f'function = "{__name__}:{function.__name__}"' in (result.folder / "config.toml").read_text()
    replayed = fedskew.simulate(result.folder / "config.toml")
    assert [record["cohort"] for record in replayed.rounds] == [record["cohort"] for record in result.rounds]
    if function is largest:
        first, second = (record["cohort"] for record in result.rounds[1:3])
        assert second == [first[-1], *first[:-1]]
