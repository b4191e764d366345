"""What a weighting sees and implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedskew.mixing import Solution

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float64]


class Answered(NamedTuple):
    """Those who answered this round.

    `counts`: their label counts, `(answered, classes)`; `sizes`: their samples, `(answered,)`; `target`: the label mix
    that the model is for, `(classes,)`, or None; `ids`: which clients they are, `(answered,)`; `state`: what the
    weighting keeps between rounds (see `fedskew.hooks`).
    """

    counts: FloatArray
    sizes: FloatArray
    target: FloatArray | None = None
    ids: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    state: Mapping[str, Tensor] = {}


class Weighting(Protocol):
    """One component of the weighting slot: a frozen dataclass of hyper-parameters."""

    needs_target: ClassVar[bool]

    def weigh(self, answered: Answered) -> FloatArray:
        """Weights of those who answered, `(answered,)`, sum 1."""


@runtime_checkable
class Solver(Protocol):
    """A weighting that solves an optimisation problem can also say how near its weights are to the optimum."""

    def solve(self, answered: Answered) -> tuple[Solution, float]:
        """The weights with certificates of their optimality, and the strength (lambda) that they are for."""
