"""A round's updates as rows of one matrix, in memory that is reused from round to round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float32]


def _allocate(size: int) -> FloatArray:
    return np.empty(size, dtype=np.float32)


class UpdateBuffer:
    """A float32 matrix on the CPU for the updates of a round, in the same memory round after round.

    Memory that is new to a process costs a page fault every 4 kB; for wide models that takes as long as a local step.

    Args:
        allocate: Makes an array of the given number of values, `(values,)`; plain memory by default.
    """

    def __init__(self, allocate: Callable[[int], FloatArray] = _allocate) -> None:
        self._allocate = allocate
        self._memory: FloatArray | None = None

    def acquire(self, rows: int, columns: int) -> Tensor | None:
        """A matrix to write to; it is free again once nothing refers to it or to a view of it.

        Args:
            rows: Number of updates.
            columns: Number of parameters.

        Returns:
            A matrix, `(rows, columns)`, of arbitrary values; None for no rows, or while a part of the last one is
            still in use.
        """
        size = rows * columns
        if size == 0:
            return None
        # A tensor over the array refers to it, and each view of that too; 2 are the attribute and the call.
        if self._memory is not None and sys.getrefcount(self._memory) > 2:
            return None
        if self._memory is None or self._memory.size < size:
            self._memory = None  # first, so as not to hold both
            self._memory = self._allocate(size)
        return torch.from_numpy(self._memory)[:size].view(rows, columns)


def as_matrix(rows: Sequence[Tensor]) -> Tensor:
    """Stack vectors of one length: a view where they are adjacent in memory, else a copy.

    Args:
        rows: The vectors, each `(columns,)`.

    Returns:
        A matrix, `(rows, columns)`.
    """
    first = rows[0]
    memory, width = first.untyped_storage().data_ptr(), first.numel()
    for position, row in enumerate(rows):
        adjacent = row.untyped_storage().data_ptr() == memory and row.dtype == first.dtype and row.is_contiguous()
        if not adjacent or row.storage_offset() != first.storage_offset() + position * width:
            return torch.stack(list(rows))
    return first.as_strided((len(rows), width), (width, 1))
