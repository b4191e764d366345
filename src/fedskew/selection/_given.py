"""Cohorts of the user's own: recorded ones, to repeat a run or compare methods on the same clients, or a function's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedskew.components import find, name_of
from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import FloatArray, IntArray, component
from fedskew.selection._protocol import Checked, check_cohort, check_first


@dataclass(frozen=True)
class ChosenSoFar:
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

    def init(self, counts: CountsLike) -> ChosenSoFar:
        """Return the state before the first round; raise ArgumentError for a client that is unknown or named twice."""
        self.check(counts, 0)
        return ChosenSoFar(0)

    def check(self, counts: CountsLike, size: int) -> None:
        """Check every cohort, whatever `size`; see `Selection.check`."""
        clients = len(as_counts(counts))
        for place, cohort in enumerate(self.cohorts):
            check_cohort(f"cohorts[{place}]", cohort, clients)

    def select(
        self, state: ChosenSoFar, counts: CountsLike, size: int, rng: np.random.Generator, first: int | None = None
    ) -> tuple[IntArray, ChosenSoFar]:
        """Return the next cohort, whatever `size`; see `Selection.select`. `rng` is not used."""
        place = state.round % len(self.cohorts)
        cohort = check_cohort(f"cohorts[{place}]", self.cohorts[place], len(as_counts(counts)))
        check_first(first, cohort)
        return cohort, ChosenSoFar(state.round + 1)


@component
class Function(Checked):
    """Selection by a function: the cohort is what `function(round, counts, size, rng)` returns.

    The function is given the round, from 1, the label counts, the size of a cohort and a numpy generator. It returns
    distinct client ids in the order of choice, `size` of them or another number. It should depend only on its
    arguments, so that a run can be repeated and resumed. Before the run it is called once for a check, as for round 1.
    A selection that keeps a state between rounds has to be a class instead.

    Attributes:
        function: `module:name`; in Python also the function itself, if it is defined at the top level of a module.
    """

    function: str | Callable[..., Any]

    def __post_init__(self) -> None:
        if callable(self.function):  # stored by name, so that it can be written to a config
            object.__setattr__(self, "function", name_of(self.function, "function"))
        if ":" not in self._name:
            raise ArgumentError(f"function: expected module:name, such as cohorts:choose, got {self.function!r}")
        if not callable(self._called):
            raise ArgumentError(f"function: {self._name} is of type {type(self._called).__name__}, not a function")

    def init(self, counts: CountsLike) -> ChosenSoFar:
        """Return the state before the first round."""
        as_counts(counts)
        return ChosenSoFar(0)

    def check(self, counts: CountsLike, size: int) -> None:
        """Check that the function returns a valid cohort for round 1; see `Selection.check`."""
        self.select(self.init(counts), counts, size, np.random.default_rng(0))

    def _choose(
        self, state: ChosenSoFar, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, ChosenSoFar]:
        seen = counts.view()
        seen.flags.writeable = False
        cohort = check_cohort(self._name, self._called(state.round + 1, seen, size, rng), len(counts))
        check_first(first, cohort)
        return cohort, ChosenSoFar(state.round + 1)

    @property
    def _name(self) -> str:
        return str(self.function)

    @property
    def _called(self) -> Callable[..., Any]:
        function: Callable[..., Any] = find({}, self._name, "function")
        return function
