"""In which order, and how often, an epoch goes through a client's samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def balanced(labels: IntArray, counts: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw as many rows as there are, with replacement, each from one of the classes, all of which are as likely.

    Of several labels a sample, it is of its rarest at the client; those without any are one class more.
    """
    by_class = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    classes = rng.integers(len(sizes), size=len(labels))
    rows: IntArray = by_class[starts[classes] + rng.integers(sizes[classes])]
    return rows


SAMPLERS = {"balanced": balanced}
"""How the rows of an epoch are drawn, by name in a config."""
