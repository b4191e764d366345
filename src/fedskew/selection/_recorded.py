"""Recorded cohorts, to repeat a run or to compare methods on the same clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.selection._protocol import IntArray, check_cohort, check_first


@dataclass(frozen=True)
class RecordedState:
    """The number of cohorts chosen so far."""

    round: int


@dataclass(frozen=True)
class Recorded:
    """Selects given cohorts in turn: round r has cohort (r - 1) mod n of n, whatever the participation.

    Attributes:
        cohorts: Client ids of each round, in the order of choice. An earlier run's cohorts are
            `[record["cohort"] for record in result.rounds[1:]]`.
    """

    needs_label_counts: ClassVar[bool] = False

    cohorts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.cohorts):
            raise ArgumentError("cohorts: expected at least one list of client ids, got none")

    def init(self, counts: CountsLike) -> RecordedState:
        """Return the state before the first round; raise ArgumentError for a client that is unknown or named twice."""
        self.check(counts, 0)
        return RecordedState(0)

    def check(self, counts: CountsLike, size: int) -> None:
        """Check every cohort, whatever `size`; see `Selection.check`."""
        clients = len(as_counts(counts))
        for place, cohort in enumerate(self.cohorts):
            check_cohort(f"cohorts[{place}]", cohort, clients)

    def select(
        self, state: RecordedState, counts: CountsLike, size: int, rng: np.random.Generator, first: int | None = None
    ) -> tuple[IntArray, RecordedState]:
        """Return the next cohort, whatever `size`; see `Selection.select`. `rng` is not used."""
        place = state.round % len(self.cohorts)
        cohort = check_cohort(f"cohorts[{place}]", self.cohorts[place], len(as_counts(counts)))
        check_first(first, cohort)
        return cohort, RecordedState(state.round + 1)
