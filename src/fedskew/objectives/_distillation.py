"""Distillation from the sent model: over all classes (FedKD), or over the classes that the client holds (FedEKD).

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; the two names are the FedVLS paper's (its table
13).

    L = T^2 mean_n KL( q^g_n || q_n ),    q = softmax(f / T) over the given classes
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
    check_outputs,
    check_positive,
    check_same,
    divergence,
    log_softmax_over,
    real_rows,
    row_mean,
    teacher_logits,
)
from fedskew.parameters import Positive, component


def distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    classes: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Divergence from the teacher among some classes.

    Args:
        logits: Logits, shape `(batch, classes)`.
        teacher_logits: The teacher's logits, shape `(batch, classes)`; they get no gradient.
        temperature: Divides both models' logits.
        classes: Class ids, 1-D int64, or a bool mask of shape `(classes,)`; None: all classes.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d; 0 where `classes` names none.

    Raises:
        ArgumentError: A wrong shape or dtype, or a temperature not above 0.
    """
    check_outputs("logits", logits, mask)
    check_same("teacher_logits", teacher_logits, logits)
    check_positive("temperature", temperature)
    among = _among(classes, logits)
    log_teacher = log_softmax_over(real_rows(teacher_logits.detach(), mask) / temperature, among)
    log_student = log_softmax_over(real_rows(logits, mask) / temperature, among)
    return temperature**2 * row_mean(divergence(log_teacher, log_student), mask)


@component
class FedKD:
    """Distillation from the sent model over all classes. The FedVLS comparison has weight 0.1 and temperature 1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Hinton et al., 2015"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`distillation` of the batch over all classes."""
        return distillation(batch.logits, teacher_logits(context), self.temperature, mask=batch.mask)


@component
class FedEKD:
    """Distillation from the sent model over the classes that the client holds. Weight and temperature as for FedKD.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Guo et al., AAAI 2025"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`distillation` of the batch over the client's classes."""
        return distillation(
            batch.logits, teacher_logits(context), self.temperature, classes=context.counts > 0, mask=batch.mask
        )


def _among(classes: Tensor | None, logits: Tensor) -> Tensor:
    count = logits.shape[1]
    if classes is None:
        return torch.ones(count, dtype=torch.bool, device=logits.device)
    if isinstance(classes, Tensor):
        if classes.dtype == torch.bool and classes.shape == (count,):
            return classes
        if classes.dtype == torch.int64 and classes.ndim == 1:
            return torch.zeros(count, dtype=torch.bool, device=logits.device).index_fill(0, classes, True)
    raise ArgumentError(f"classes: expected class ids, 1-D int64, or a bool mask of shape ({count},), got {classes!r}")
