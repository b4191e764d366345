"""Findings: the labels of a sample that has several, or none, as the bits of one number, the first finding's lowest."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]

MOST = 62
"""Findings that a number has room for."""


def as_table(bits: ArrayLike, number: int) -> IntArray:
    """Return the rows of 0 and 1, `(samples, number)`, whose bits these numbers are, `(samples,)`."""
    return np.asarray(bits, dtype=np.int64)[:, None] >> np.arange(number) & 1


def rarest(table: IntArray) -> IntArray:
    """Return of each row of 0 and 1 its finding that the fewest rows have, `(samples,)`; of none, the columns' number:
    the one class by which samples are divided."""
    often = np.append(table.sum(axis=0), len(table) + 1)
    order = np.argsort(often, kind="stable")
    whole = np.column_stack([table, np.ones(len(table), dtype=np.int64)])
    found: IntArray = order[whole[:, order].argmax(axis=1)]
    return found
