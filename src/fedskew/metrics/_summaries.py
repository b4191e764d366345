"""One figure for a curve of figures, one per evaluation (accuracy: more is better)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError


def final(curve: Sequence[float]) -> float:
    """The last value."""
    return float(_curve("curve", curve)[-1])


def last10_mean(curve: Sequence[float]) -> float:
    """The mean of the last 10 values, of all where there are fewer (FedEntOpt)."""
    return float(_curve("curve", curve)[-10:].mean())


def highest(curve: Sequence[float]) -> float:
    """The largest value (FedVLS). On test figures it is optimistic: it picks the round on the test set."""
    return float(_curve("curve", curve).max())


def best_by_validation(validation: Sequence[float]) -> int:
    """The place of the largest validation figure, the first of equals: where to read the test curve (FedPALS)."""
    return int(_curve("validation", validation).argmax())


def _curve(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    curve = np.asarray(values, dtype=np.float64)
    if curve.ndim != 1 or not curve.size or np.isnan(curve).any():
        raise ArgumentError(f"{name}: must be at least one number, and none of them NaN")
    return curve
