"""A share of one client's samples that it does not train on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.partition._rule import IntArray


def hold_out(rows: IntArray, labels: ArrayLike, share: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Divide a client's samples into those that it trains on and those that are held out.

    Every sample is held out with the same probability, and of every class the share, rounded up or down at random: so
    that over many clients a class of which each has few samples is held out as often as any. One sample at least stays.

    Args:
        rows: The client's samples.
        labels: Class ids of the whole data set, shape `(samples,)`.
        share: Share to hold out, from 0 to below 1.
        rng: Source of all random draws.

    Returns:
        Two ascending arrays: samples to train on, and samples held out.

    Raises:
        ArgumentError: `share` is not from 0 to below 1.
    """
    if not 0 <= share < 1:
        raise ArgumentError(f"share: must be from 0 to below 1, not {share}")
    mixed = rng.permutation(np.asarray(rows, dtype=np.int64))
    by_class = mixed[np.argsort(np.asarray(labels)[mixed], kind="stable")]
    passed = np.floor(share * np.arange(len(by_class) + 1) + rng.random())  # systematic sampling, from a random start
    taken = np.diff(passed) > 0
    if taken.all():
        taken[-1:] = False
    return np.sort(by_class[~taken]), np.sort(by_class[taken])
