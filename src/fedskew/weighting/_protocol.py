"""What a weighting receives and implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedskew.mixing import Solution

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float64]


class Answered(NamedTuple):
    """The clients that replied in a round.

    Attributes:
        counts: Their label counts, shape `(answered, classes)`.
        sizes: Their numbers of samples, shape `(answered,)`.
        target: The label mix that the model is for, shape `(classes,)`, or None.
        ids: Which clients they are, shape `(answered,)`.
        state: What the weighting keeps between rounds (see `fedskew.hooks`).
        limit: Upper limit on a client's weight, which the engine applies to whatever a weighting returns (`limited`); a
            weighting that optimises can do so under it. None: there is no limit.
    """

    counts: FloatArray
    sizes: FloatArray
    target: FloatArray | None = None
    ids: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    state: Mapping[str, Tensor] = {}
    limit: float | None = None


class Weighting(Protocol):
    """A component of the weighting slot: a frozen dataclass of hyper-parameters.

    One that reads the target label mix declares `needs_target`, so that a run without a target is refused.
    """

    def weigh(self, answered: Answered) -> FloatArray:
        """Return the weights of the clients that replied, shape `(answered,)`, sum 1."""


@runtime_checkable
class Solver(Protocol):
    """A weighting that solves an optimisation problem, and can say how near its weights are to the optimum."""

    def solve(self, answered: Answered) -> tuple[Solution, float]:
        """The weights with certificates of their optimality, and the strength (lambda) that they are for."""
