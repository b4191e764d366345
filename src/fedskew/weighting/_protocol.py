"""What a weighting sees and implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

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
