"""Whole numbers as close as possible to given shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedskew.partition._protocol import IntArray


def apportion(totals: IntArray, shares: NDArray[np.float64] | IntArray) -> IntArray:
    """Divide each row's total by its shares, by largest remainder; equal remainders go to the lowest column.

    `totals`: `(rows,)`; `shares`: `(rows, columns)`, non-negative with a positive sum in each row. Returns
    `(rows, columns)` whose row sums are the totals; no entry is further than 1 from its exact quota.
    """
    quotas = totals[:, None] * (shares / shares.sum(axis=1, keepdims=True))
    counts: IntArray = np.floor(quotas).astype(np.int64)
    order = np.argsort(counts - quotas, axis=1, kind="stable")
    one_more = np.arange(shares.shape[1]) < (totals - counts.sum(axis=1))[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + one_more, axis=1)
    return counts
