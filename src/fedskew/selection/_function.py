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
from fedskew.selection._protocol import Checked, FloatArray, IntArray, check_cohort, check_first


@dataclass(frozen=True)
class FunctionState:
    """The number of cohorts chosen so far."""

    round: int


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

    def init(self, counts: CountsLike) -> FunctionState:
        """Return the state before the first round."""
        as_counts(counts)
        return FunctionState(0)

    def check(self, counts: CountsLike, size: int) -> None:
        """Check that the function returns a valid cohort for round 1; see `Selection.check`."""
        self.select(self.init(counts), counts, size, np.random.default_rng(0))

    def _choose(
        self, state: FunctionState, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, FunctionState]:
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
