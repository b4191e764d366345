"""Reductions over part of a tensor, finite in value and in gradient where that part is empty.

The selection is a bool tensor, never an index, so that every client of a mapped cohort runs the same operations. What
is left out is replaced before the operation as well as after it (a "double where"): with a mask on the result alone, a
NaN or an infinity in the left-out part would come back through the gradient as 0 * inf.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def real_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """`values`, `(batch, ...)`, with padded rows set to 0; as they are where `mask` is None."""
    if mask is None:
        return values
    return torch.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def row_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of `values`, `(batch,)`, over real rows; 0 where there is none."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def is_target(targets: Tensor, classes: int) -> Tensor:
    """True at each row's class, `(batch, classes)`."""
    return targets.unsqueeze(1) == torch.arange(classes, device=targets.device)


def log_softmax_over(logits: Tensor, keep: Tensor) -> Tensor:
    """The log-softmax over the kept classes of each row, `(batch, classes)`; 0 at the others."""
    empty = ~keep.any(dim=-1, keepdim=True)
    return torch.where(keep, torch.where(keep | empty, logits, -math.inf).log_softmax(dim=-1), 0)


def logsumexp_over(values: Tensor, keep: Tensor, dim: int) -> Tensor:
    """The log of the sum of the kept exponentials along `dim`; 0 where nothing is kept."""
    empty = ~keep.any(dim=dim, keepdim=True)
    total = torch.where(keep | empty, values, -math.inf).logsumexp(dim=dim)
    return torch.where(empty.squeeze(dim), 0, total)


def divergence(log_teacher: Tensor, log_student: Tensor) -> Tensor:
    """KL(teacher || student) of each row, `(batch,)`, from log-probabilities that are both 0 at left-out classes."""
    return (log_teacher.exp() * (log_teacher - log_student)).sum(dim=-1)


def cross_entropy_over(logits: Tensor, targets: Tensor, keep: Tensor, mask: Tensor | None) -> Tensor:
    """Mean cross-entropy with the classes outside `keep`, `(classes,)`, taken out of the softmax.

    An empty client keeps no class; its rows are all padding, and only need to stay finite.
    """
    restricted = torch.where(keep | ~keep.any(), real_rows(logits, mask), -math.inf)
    if mask is None:
        return F.cross_entropy(restricted, targets)
    return row_mean(F.cross_entropy(restricted, real_rows(targets, mask), reduction="none"), mask)


def unit_rows(vectors: Tensor) -> Tensor:
    """Each row divided by its length; a row of zeros stays zero, with a finite gradient."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1)
