"""The memory of a round's updates: reused, but never while a part of it is in use."""

from __future__ import annotations

import pytest
import torch

from fedskew.engine import UpdateBuffer, as_matrix


def test_memory_is_reused_once_nothing_refers_to_a_part_of_it():
    rows = UpdateBuffer()
    first = rows.acquire(3, 5)
    at = first.data_ptr()
    assert rows.acquire(3, 5) is None
    part = first[1][2:].view(-1)
    del first
    assert rows.acquire(3, 5) is None
    part.fill_(7.0)
    del part
    smaller = rows.acquire(2, 4)
    assert (smaller.shape, smaller.data_ptr()) == ((2, 4), at)
    del smaller
    larger = rows.acquire(30, 5)
    assert larger.shape == (30, 5)
    larger.fill_(1.0)
    del larger
    assert rows.acquire(0, 5) is None


def test_rows_beside_each_other_are_a_matrix_without_a_copy():
    matrix = torch.arange(12.0).view(4, 3)
    seen = as_matrix(list(matrix[1:]))
    assert torch.equal(seen, matrix[1:])
    assert seen.data_ptr() == matrix[1].data_ptr()


@pytest.mark.parametrize(
    "rows",
    [
        [torch.arange(3.0), torch.arange(3.0) + 5],
        [*torch.arange(12.0).view(4, 3)[[2, 0]], torch.zeros(3)],
        [*torch.arange(12.0).view(4, 3)[::2]],
        [*torch.arange(12.0).view(4, 3).flip(0)],
        [*torch.arange(12.0).view(3, 4).T],
    ],
    ids=["apart", "mixed", "with gaps", "backwards", "columns"],
)
def test_other_rows_are_copied(rows):
    assert torch.equal(as_matrix(rows), torch.stack(rows))
