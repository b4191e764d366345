"""What a weighting implements."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Weighting(Protocol):
    """One filler of the weighting slot: a frozen dataclass of hyper-parameters."""

    needs_target: ClassVar[bool]

    def weigh(self, counts: FloatArray, sizes: FloatArray, target: FloatArray | None) -> FloatArray:
        """Weights of those who answered, `(answered,)`, sum 1. `counts`: `(answered, classes)`; `sizes` alike."""
