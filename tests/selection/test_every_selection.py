"""What holds for every selection."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from choosing import chosen, played

from fedskew.errors import ArgumentError
from fedskew.labels import LabelCounts
from fedskew.selection import INDEX, FedEntOpt, GreedyKL, Selection, SeolKim, Uniform

FedCBS = INDEX["fedcbs"]
COUNTS = np.random.default_rng(0).integers(0, 9, (20, 4)).astype(float)
COUNTS.setflags(write=False)  # no selection changes them

every_selection = pytest.mark.parametrize(
    "selection",
    [
        Uniform(),
        FedEntOpt(0.25),
        INDEX["fedentopt_target"](0.25),
        FedCBS(),
        SeolKim(0),
        GreedyKL(),
        GreedyKL(normalise=True),
    ],
    ids=repr,
)


def parts(state) -> list[np.ndarray]:
    return [np.copy(getattr(state, field.name)) for field in dataclasses.fields(state)] if state is not None else []


@every_selection
def test_gives_different_clients_in_order_of_choice_beginning_with_a_given_one(selection: Selection) -> None:
    cohorts = played(selection, COUNTS, 3, 5)[0]
    for cohort in cohorts:
        assert len(cohort) == len(set(cohort)) <= 5
        assert set(cohort) <= set(range(20))
    for first in (0, 11, 19):
        cohort = chosen(selection, COUNTS, 4, first=first)
        assert cohort[0] == first
        assert len(set(cohort)) == len(cohort)
    selection.check(LabelCounts(COUNTS), 5)
    assert chosen(selection, LabelCounts(COUNTS), 5) == chosen(selection, COUNTS, 5) == cohorts[0]


@every_selection
def test_is_a_function_of_state_counts_and_rng_and_changes_no_state(selection: Selection) -> None:
    state = selection.init(COUNTS)
    before = parts(state)
    once, again = (selection.select(state, COUNTS, 5, np.random.default_rng(3)) for _ in range(2))
    assert once[0].tolist() == again[0].tolist()
    for one, other in ((before, parts(state)), (parts(once[1]), parts(again[1]))):
        for old, new in zip(one, other, strict=True):
            np.testing.assert_array_equal(old, new)


BAD_COUNTS = [np.ones(3), np.ones((0, 3)), [[1.0, -1.0]], [[1.0, float("nan")]], [[1.0, float("inf")]]]


@every_selection
def test_refuses_what_can_not_be_by_name(selection: Selection) -> None:
    state, rng = selection.init(COUNTS), np.random.default_rng(0)
    for size in (0, 21, 2.5, True):
        for ask in (partial(selection.select, state, COUNTS, size, rng), partial(selection.check, COUNTS, size)):
            with pytest.raises(ArgumentError, match="size: must be a whole number from 1 to 20, the number of clients"):
                ask()
    for first in (-1, 20, 0.5):
        with pytest.raises(ArgumentError, match="first: must be a client id from 0 to 19"):
            selection.select(state, COUNTS, 2, rng, first=first)
    for counts in BAD_COUNTS:
        with pytest.raises(ArgumentError, match="counts"):
            selection.select(state, counts, 1, rng)
    if isinstance(selection, Uniform | FedEntOpt | FedCBS):  # who draws
        with pytest.raises(ArgumentError, match="rng: must be a"):
            selection.select(state, COUNTS, 2, 0)


def test_the_index_has_the_papers_defaults() -> None:
    expected = {
        "uniform": Uniform(),
        "fedentopt": FedEntOpt(buffer=0.5, candidates=None),
        "fedcbs": FedCBS(exploration=10.0, exponent=1.0),
        "seol_kim": SeolKim(threshold=0.01),
        "greedy_kl": GreedyKL(normalise=False),
    }
    assert {name: INDEX[name]() for name in expected} == expected
