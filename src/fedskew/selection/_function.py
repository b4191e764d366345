"""Selection by a user's own function, without a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.components import find, name_of
from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import component
from fedskew.selection._protocol import IntArray, check_cohort, check_first, check_rng, check_round


@dataclass(frozen=True)
class FunctionState:
    """State of Function.

    Attributes:
        round: The number of cohorts chosen so far.
    """

    round: int


@component
class Function:
    """The cohort is what `function(round, counts, size, rng)` returns.

    It gets the round, from 1, the label counts, the size of a cohort and a numpy generator, and returns distinct client
    ids in order of choice, `size` of them or another number. It should depend on nothing but its arguments, so that a
    run can be repeated and resumed; before the run it is called once more for round 1. A selection with a memory has to
    be a class instead.

    Attributes:
        function: `module:name`, or from Python the function itself, defined at the top level of a module.
    """

    function: str | Callable[..., Any]

    def __post_init__(self) -> None:
        if callable(self.function):  # kept by name, so that a config can be written
            object.__setattr__(self, "function", name_of(self.function, "function"))
        if ":" not in self._name:
            raise ArgumentError(f"function: expected module:name, such as cohorts:choose, got {self.function!r}")
        if not callable(self._called):
            raise ArgumentError(f"function: {self._name} is of type {type(self._called).__name__}, not a function")

    def init(self, counts: CountsLike) -> FunctionState:
        """Return the state before the first round."""
        as_counts(counts)
        return FunctionState(0)

    def check(self, counts: CountsLike, size: int) -> None:
        """Call the function for a first cohort; see `Selection.check`."""
        self.select(self.init(counts), counts, size, np.random.default_rng(0))

    def select(
        self,
        state: FunctionState,
        counts: CountsLike,
        size: int,
        rng: np.random.Generator,
        first: int | None = None,
    ) -> tuple[IntArray, FunctionState]:
        """Return what the function returns; see `Selection.select`. ArgumentError where these are no client ids."""
        counts = as_counts(counts)
        check_round(len(counts), size, first)
        check_rng(rng)
        seen = counts.view()
        seen.flags.writeable = False
        cohort = check_cohort(self._name, self._called(state.round + 1, seen, size, rng), len(counts))
        check_first(first, cohort)
        return cohort, FunctionState(state.round + 1)

    @property
    def _name(self) -> str:
        return str(self.function)

    @property
    def _called(self) -> Callable[..., Any]:
        function: Callable[..., Any] = find({}, self._name, "function")
        return function
