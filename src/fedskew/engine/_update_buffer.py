"""Memory for a round's updates, as rows of one matrix; it is reused from round to round."""

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
    """A float32 matrix on the CPU for the updates of a round, in memory that is reused from round to round.

    Memory that is new to a process costs a page fault every 4 kB, which for wide models takes as long as a local step.

    Args:
        allocate: A function from a number of values to an array, `(values,)`; it allocates plain memory by default.
    """

    def __init__(self, allocate: Callable[[int], FloatArray] = _allocate) -> None:
        self._allocate = allocate
        self._memory: FloatArray | None = None

    def acquire(self, rows: int, columns: int) -> Tensor | None:
        """Return a matrix to write to; its memory can be reused once nothing refers to the matrix or to a view of it.

        Args:
            rows: Number of updates.
            columns: Number of parameters.

        Returns:
            A matrix, `(rows, columns)`, of arbitrary values; None if it would be empty, or while a part of the last
            matrix is still in use.
        """
        size = rows * columns
        if size == 0:
            return None
        # Two references are the attribute and the call's argument; any other is a tensor in use, or a view of one.
        if self._memory is not None and sys.getrefcount(self._memory) > 2:
            return None
        if self._memory is None or self._memory.size < size:
            self._memory = None  # frees the old memory before the new is allocated
            self._memory = self._allocate(size)
        return torch.from_numpy(self._memory)[:size].view(rows, columns)


def as_matrix(rows: Sequence[Tensor]) -> Tensor:
    """Stack vectors of equal length into a matrix.

    Args:
        rows: The vectors, each `(columns,)`.

    Returns:
        A matrix, `(rows, columns)`: a view if the vectors are adjacent in memory, else a copy.
    """
    first = rows[0]
    memory, width = first.untyped_storage().data_ptr(), first.numel()
    for position, row in enumerate(rows):
        adjacent = row.untyped_storage().data_ptr() == memory and row.dtype == first.dtype and row.is_contiguous()
        if not adjacent or row.storage_offset() != first.storage_offset() + position * width:
            return torch.stack(list(rows))
    return first.as_strided((len(rows), width), (width, 1))
