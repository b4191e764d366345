"""A user's own function as a selection."""

from __future__ import annotations

import numpy as np
import pytest

import fedskew
from fedskew.errors import ArgumentError, ConfigError
from fedskew.selection import INDEX

Function = INDEX["function"]

COUNTS = np.arange(12.0).reshape(6, 2)

TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.5, "min_size": 1},
    "model": "logistic",
    "training": {"rounds": 3, "participation": 0.5, "batch_size": 64},
}


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
    state = selection.init(COUNTS)
    for expected in ([3, 5, 4], [4, 3, 5]):
        cohort, state = selection.select(state, COUNTS, 3, np.random.default_rng(0))
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
        selection.select(selection.init(COUNTS), COUNTS, 2, np.random.default_rng(0))


def test_it_cannot_change_the_label_counts() -> None:
    counts = COUNTS.copy()
    with pytest.raises(ValueError, match="read-only"):
        Function(rewrites).select(Function(rewrites).init(counts), counts, 2, np.random.default_rng(0))
    assert (counts == COUNTS).all()


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
    result = fedskew.simulate(TASK, method={"selection": written(function)}, out=tmp_path)
    assert f'function = "{__name__}:{function.__name__}"' in (result.folder / "config.toml").read_text()
    replayed = fedskew.simulate(result.folder / "config.toml")
    assert [record["cohort"] for record in replayed.rounds] == [record["cohort"] for record in result.rounds]
    if function is largest:
        first, second = (record["cohort"] for record in result.rounds[1:3])
        assert second == [first[-1], *first[:-1]]
