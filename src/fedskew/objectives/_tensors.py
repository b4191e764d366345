"""Shared by the losses: checks of their arguments, and reductions over part of a tensor.

Checks read shapes and dtypes of tensors, and ranges of plain numbers. Values inside tensors are checked once, where
data and counts enter; reading them here would cost a synchronisation per step.

Reductions are finite in value and in gradient where the part is empty. The part is a bool tensor, never an index, so
that every client of a mapped cohort runs the same operations. What is left out is replaced before the operation as well
as after it (a "double where"): with a mask on the result alone, a NaN or an infinity in the left-out part would come
back through the gradient as 0 * inf.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.models import Outputs
from fedskew.objectives._protocol import Context


def check_outputs(name: str, outputs: Tensor, mask: Tensor | None) -> None:
    """Check for a float matrix of at least one row and column, `(batch, columns)`, and its mask, `(batch,)` bool."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not outputs.is_floating_point() or 0 in outputs.shape:
        raise ArgumentError(
            f"{name}: expected a non-empty float tensor of shape (batch, columns), got {_kind(outputs)}"
        )
    if mask is not None:
        _check_rows("mask", mask, outputs, name, torch.bool)


def check_targets(targets: Tensor, outputs: Tensor, name: str) -> None:
    """Check for one int64 class id per row of `outputs`, which the caller calls `name`."""
    _check_rows("targets", targets, outputs, name, torch.int64)


def check_counts(counts: Tensor, logits: Tensor) -> None:
    """Check for one client's label counts, `(classes,)`, in the logits' dtype."""
    if not isinstance(counts, Tensor) or counts.shape != logits.shape[1:] or counts.dtype != logits.dtype:
        raise ArgumentError(
            f"counts: expected one client's counts, shape {tuple(logits.shape[1:])} and dtype {logits.dtype} "
            f"as the logits have, got {_kind(counts)}"
        )


def check_same(name: str, other: Tensor, outputs: Tensor) -> None:
    """Raise ArgumentError unless a tensor has the shape and dtype of `outputs`."""
    if not isinstance(other, Tensor) or other.shape != outputs.shape or other.dtype != outputs.dtype:
        raise ArgumentError(f"{name}: expected {_kind(outputs)} as the first argument is, got {_kind(other)}")


def check_columns(name: str, rows: Tensor, outputs: Tensor, of: str) -> None:
    """Raise ArgumentError unless rows have the width and dtype of `outputs`, which the caller knows as `of`."""
    width = outputs.shape[1]
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[1] != width or rows.dtype != outputs.dtype:
        raise ArgumentError(f"{name}: expected {outputs.dtype} (rows, {width}) as {of} are, got {_kind(rows)}")


def check_positive(name: str, value: float) -> None:
    """Check for a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name}: must be above 0 and finite, got {value}")


def check_non_negative(name: str, value: float) -> None:
    """Check for a finite number, 0 or above."""
    if not (math.isfinite(value) and value >= 0):
        raise ArgumentError(f"{name}: must be 0 or above and finite, got {value}")


def teacher_outputs(context: Context) -> Outputs:
    """Return the outputs of the model that the server sent; raise ArgumentError if the caller gave none."""
    if context.teacher is None:
        raise ArgumentError("context.teacher: this loss reads the outputs of the sent model on the same rows, got None")
    return context.teacher


def teacher_logits(context: Context) -> Tensor:
    """Return the logits of the model that the server sent; raise ArgumentError if the caller gave none."""
    return teacher_outputs(context).logits


def _check_rows(name: str, values: Tensor, outputs: Tensor, of: str, dtype: torch.dtype) -> None:
    if not isinstance(values, Tensor) or values.shape != outputs.shape[:1] or values.dtype != dtype:
        raise ArgumentError(
            f"{name}: expected one {dtype} for each row of {of}, shape ({outputs.shape[0]},), got {_kind(values)}"
        )


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def real_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return `values`, `(batch, ...)`, with padded rows set to 0; unchanged if `mask` is None."""
    if mask is None:
        return values
    return torch.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, 0)


def is_real(outputs: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of real rows, `(batch,)`; True everywhere if `mask` is None."""
    return torch.ones_like(outputs[:, 0], dtype=torch.bool) if mask is None else mask


def row_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of `values`, `(batch,)`, over real rows; 0 if there is none."""
    if mask is None:
        return values.mean()
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def is_target(targets: Tensor, classes: int) -> Tensor:
    """Return a `(batch, classes)` mask that is True at each row's class."""
    return targets.unsqueeze(1) == torch.arange(classes, device=targets.device)


def log_softmax_over(logits: Tensor, keep: Tensor) -> Tensor:
    """Return the log-softmax over the kept classes of each row, `(batch, classes)`; 0 at the others."""
    empty = ~keep.any(dim=-1, keepdim=True)
    return torch.where(keep, torch.where(keep | empty, logits, -math.inf).log_softmax(dim=-1), 0)


def logsumexp_over(values: Tensor, keep: Tensor, dim: int) -> Tensor:
    """Return the log of the sum of the kept exponentials along `dim`; 0 if nothing is kept."""
    empty = ~keep.any(dim=dim, keepdim=True)
    total = torch.where(keep | empty, values, -math.inf).logsumexp(dim=dim)
    return torch.where(empty.squeeze(dim), 0, total)


def divergence(log_teacher: Tensor, log_student: Tensor) -> Tensor:
    """Return KL(teacher || student) of each row, `(batch,)`; both log-probabilities must be 0 at classes left out."""
    return (log_teacher.exp() * (log_teacher - log_student)).sum(dim=-1)


def cross_entropy_over(logits: Tensor, targets: Tensor, keep: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean cross-entropy with the classes outside `keep`, `(classes,)`, taken out of the softmax.

    An empty client keeps no class; its rows are all padding, and only need to stay finite.
    """
    restricted = torch.where(keep | ~keep.any(), real_rows(logits, mask), -math.inf)
    if mask is None:
        return F.cross_entropy(restricted, targets)
    return row_mean(F.cross_entropy(restricted, real_rows(targets, mask), reduction="none"), mask)
