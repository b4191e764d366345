"""Which updates are finite, and what takes the place of one that is not where nobody may learn of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedskew.engine._backend import Update


def finite(updates: Sequence[Update]) -> list[Update]:
    """Return the updates without a NaN or infinite value. Waits for the GPU once, not once an update.

    Args:
        updates: The updates.
    """
    norms = torch.stack([_norm(update) for update in updates]).tolist() if updates else []
    return [update for update, norm in zip(updates, norms, strict=True) if math.isfinite(norm) or _all_finite(update)]


def stilled(update: Update) -> Update:
    """Return an update, or one of zeros in its place where a value is NaN or infinite.

    With differential privacy a client whose training diverged adds noise alone: that it diverged is told to nobody.

    Args:
        update: The update.

    Returns:
        The update itself where it is finite.
    """
    if finite([update]):
        return update
    return update._replace(change=torch.zeros_like(update.change), norm=torch.zeros_like(update.norm))


def is_finite(part: Tensor) -> bool:
    """Return whether a tensor has no NaN or infinite value.

    Args:
        part: The tensor, of one element at least.
    """
    return all(map(math.isfinite, part.aminmax()))


def _norm(update: Update) -> Tensor:
    """Return a 0-d sum of norms, finite only if all of the update is; far faster than a test of every element."""
    return sum((torch.linalg.vector_norm(part) for part in _extras(update)), start=update.norm)


def _all_finite(update: Update) -> bool:
    """Return whether every value of an update is finite; exact also if the update's norm overflows."""
    return all(map(is_finite, (update.change, *_extras(update))))


def _extras(update: Update) -> list[Tensor]:
    """Return the floating-point tensors of an update other than its change, without empty ones."""
    parts = (update.buffers, *update.reply.values(), *update.state.values())
    return [part for part in parts if part.is_floating_point() and part.numel()]
