"""A round's updates as rows of one matrix, whose memory is used again once nobody holds them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float32]


def _fresh(size: int) -> FloatArray:
    return np.empty(size, dtype=np.float32)


class UpdateBuffer:
    """Lends float32 matrices on the CPU, of the same memory round after round.

    Memory that is new to a process costs a page fault every 4 kB; for wide models that takes as long as a local step.
    `allocate`: makes an array of so many values, `(values,)`.
    """

    def __init__(self, allocate: Callable[[int], FloatArray] = _fresh) -> None:
        self._allocate = allocate
        self._memory: FloatArray | None = None

    def lend(self, rows: int, columns: int) -> Tensor | None:
        """A matrix, `(rows, columns)`, of any values; None for no rows, and while a part of the last one is held."""
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
    """Vectors of one length as a matrix, `(rows, columns)`: a view where they lie one after another, else a copy."""
    first = rows[0]
    memory, width = first.untyped_storage().data_ptr(), first.numel()
    for place, row in enumerate(rows):
        beside = row.untyped_storage().data_ptr() == memory and row.dtype == first.dtype and row.is_contiguous()
        if not beside or row.storage_offset() != first.storage_offset() + place * width:
            return torch.stack(list(rows))
    return first.as_strided((len(rows), width), (width, 1))
