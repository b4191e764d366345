"""What holds for every selection."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts
from fedskew.selection import INDEX, FedEntOpt, GreedyKL, Selection, SeolKim, Uniform

FedCBS = INDEX["fedcbs"]
Function = INDEX["function"]
Recorded = INDEX["recorded"]

COUNTS = np.random.default_rng(0).integers(0, 9, (20, 4)).astype(float)

every_selection = pytest.mark.parametrize(
    "selection", [Uniform(), FedEntOpt(0.25), FedCBS(), SeolKim(0), GreedyKL(), GreedyKL(normalise=True)], ids=repr
)


@every_selection
def test_gives_different_clients_in_order_of_choice(selection: Selection) -> None:
    state = selection.init(COUNTS)
    for round in range(3):
        cohort, state = selection.select(state, COUNTS, 5, np.random.default_rng(round))
        assert cohort.dtype == np.int64
        assert len(cohort) == len(set(cohort.tolist())) <= 5
        assert cohort.min() >= 0
        assert cohort.max() < 20


@every_selection
def test_label_counts_are_taken_as_the_array_is(selection: Selection) -> None:
    record = LabelCounts(COUNTS)
    selection.check(record, 5)
    plain, _ = selection.select(selection.init(COUNTS), COUNTS, 5, np.random.default_rng(0))
    named, _ = selection.select(selection.init(record), record, 5, np.random.default_rng(0))
    assert plain.tolist() == named.tolist()


@every_selection
def test_begins_with_a_given_client(selection: Selection) -> None:
    for first in (0, 11, 19):
        cohort, _ = selection.select(selection.init(COUNTS), COUNTS, 4, np.random.default_rng(0), first=first)
        assert cohort[0] == first
        assert len(set(cohort.tolist())) == len(cohort)


@every_selection
def test_is_a_function_of_state_counts_and_rng(selection: Selection) -> None:
    state = selection.init(COUNTS)
    once, after = selection.select(state, COUNTS, 5, np.random.default_rng(3))
    again, after_again = selection.select(state, COUNTS, 5, np.random.default_rng(3))
    assert once.tolist() == again.tolist()
    for field in dataclasses.fields(after) if after is not None else ():
        np.testing.assert_array_equal(getattr(after, field.name), getattr(after_again, field.name))


@every_selection
def test_changes_neither_counts_nor_state(selection: Selection) -> None:
    counts = COUNTS.copy()
    counts.setflags(write=False)
    state = selection.init(counts)
    before = [np.copy(getattr(state, field.name)) for field in dataclasses.fields(state)] if state is not None else []
    selection.select(state, counts, 5, np.random.default_rng(0))
    after = [getattr(state, field.name) for field in dataclasses.fields(state)] if state is not None else []
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@every_selection
@pytest.mark.parametrize("size", [0, 21, 2.5, True])
def test_refuses_a_cohort_of_that_size(selection: Selection, size) -> None:
    with pytest.raises(ArgumentError, match="size: must be a whole number from 1 to 20, the number of clients"):
        selection.select(selection.init(COUNTS), COUNTS, size, np.random.default_rng(0))
    with pytest.raises(ArgumentError, match="size: must be a whole number from 1 to 20, the number of clients"):
        selection.check(COUNTS, size)


@every_selection
@pytest.mark.parametrize("first", [-1, 20, 0.5])
def test_refuses_a_first_client_that_does_not_exist(selection: Selection, first) -> None:
    with pytest.raises(ArgumentError, match="first: must be a client id from 0 to 19"):
        selection.select(selection.init(COUNTS), COUNTS, 2, np.random.default_rng(0), first=first)


@pytest.mark.parametrize("selection", [Uniform(), FedEntOpt(0.25), FedCBS()], ids=repr)
def test_who_draws_refuses_a_seed_in_place_of_a_generator(selection: Selection) -> None:
    with pytest.raises(ArgumentError, match="rng: must be a"):
        selection.select(selection.init(COUNTS), COUNTS, 2, 0)


@every_selection
@pytest.mark.parametrize(
    "counts", [np.ones(3), np.ones((0, 3)), [[1.0, -1.0]], [[1.0, float("nan")]], [[1.0, float("inf")]]]
)
def test_refuses_bad_counts(selection: Selection, counts) -> None:
    with pytest.raises(ArgumentError, match="counts"):
        selection.select(selection.init(COUNTS), counts, 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "parameter", "wrong"),
    [
        ("fedentopt", "buffer", (-0.1, 1.0, float("nan"))),
        ("fedentopt", "candidates", (0, -3, 2.5, True)),
        ("fedcbs", "exploration", (-1.0, float("inf"))),
        ("fedcbs", "exponent", (0.0, -1.0)),
        ("seol_kim", "threshold", (-0.1, float("nan"), float("inf"))),
        ("greedy_kl", "normalise", (1,)),
    ],
)
def test_senseless_parameters_are_refused_by_name(name: str, parameter: str, wrong: tuple) -> None:
    for value in wrong:
        with pytest.raises(ArgumentError, match=f"^{parameter}: input should be "):
            INDEX[name](**{parameter: value})


def test_the_index_names_every_selection() -> None:
    expected = {
        "uniform": Uniform(),
        "fedentopt": FedEntOpt(buffer=0.5, candidates=None),
        "fedcbs": FedCBS(exploration=10.0, exponent=1.0),
        "seol_kim": SeolKim(threshold=0.01),
        "greedy_kl": GreedyKL(normalise=False),
    }
    assert {name: INDEX[name]() for name in expected} == expected
    assert (INDEX["recorded"], INDEX["function"]) == (Recorded, Function)
