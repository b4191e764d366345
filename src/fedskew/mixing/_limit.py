"""An upper limit on what one client's update counts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.mixing._dual import FloatArray


def limited(weights: ArrayLike, limit: float, sizes: ArrayLike) -> FloatArray:
    """Weights, `(clients,)`, sum 1, of which none is above a limit from 0 (excluded) to 1.

    What is cut off goes to the other clients in proportion to their weights, again and again until none is above the
    limit. Where nobody else has weight, it goes in equal parts to those who hold a sample and have none. Where the
    limit can't hold, as there are fewer than 1 / limit clients with a sample, these have equal weights.

    Example:
        limited([0.8, 0.15, 0.05], 0.5, [80, 15, 5])    # [0.5, 0.375, 0.125]
    """
    if not 0 < limit <= 1:
        raise ArgumentError(f"limit: must be above 0 and at most 1, not {limit!r}")
    shares = np.asarray(weights, dtype=np.float64)
    above, held = shares > limit * (1 + 1e-12), np.asarray(sizes) > 0
    if not above.any():
        return shares
    if held.sum() * limit <= 1:
        equal: FloatArray = held / held.sum()
        return equal
    full = np.zeros_like(held)
    while above.any():
        full |= above
        free = held & ~full
        wanted = np.where(free, shares, 0.0)
        if not wanted.any():
            wanted = free.astype(np.float64)
        rest = 1 - limit * full.sum()
        found = np.where(full, limit, wanted * (rest / wanted.sum()))
        above = free & (found > limit * (1 + 1e-12))
    return found
