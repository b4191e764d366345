"""Cohorts from a recorded list."""

from __future__ import annotations

import numpy as np
import pytest

import fedskew
from fedskew.errors import ArgumentError
from fedskew.selection import INDEX

Recorded = INDEX["recorded"]

COUNTS = np.ones((6, 2))
RNG = np.random.default_rng(0)

TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.5, "min_size": 1},
    "model": "logistic",
    "training": {"rounds": 5, "participation": 0.5, "batch_size": 64},
}


def played(selection: Recorded, rounds: int) -> list[list[int]]:
    state, cohorts = selection.init(COUNTS), []
    for _ in range(rounds):
        cohort, state = selection.select(state, COUNTS, 2, RNG)
        assert cohort.dtype == np.int64
        cohorts.append(cohort.tolist())
    return cohorts


def test_cohorts_come_in_their_order_and_begin_again() -> None:
    assert played(Recorded(((3, 0), (5,), (1, 2, 4))), 5) == [[3, 0], [5], [1, 2, 4], [3, 0], [5]]


def test_it_draws_nothing() -> None:
    rng = np.random.default_rng(1)
    before = rng.bit_generator.state
    Recorded(((0, 1),)).select(Recorded(((0, 1),)).init(COUNTS), COUNTS, 2, rng)
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
        Recorded(cohorts).init(COUNTS)


def test_it_cannot_begin_with_another_client() -> None:
    selection = Recorded(((3, 0),))
    assert selection.select(selection.init(COUNTS), COUNTS, 2, RNG, first=3)[0].tolist() == [3, 0]
    with pytest.raises(ArgumentError, match="first: the cohort begins with client 3 and can't begin with 0"):
        selection.select(selection.init(COUNTS), COUNTS, 2, RNG, first=0)


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
