"""FedLMD: distil the sent model's predictions of the classes of which the client has few samples.

Lu et al., "Federated Learning with Label-Masking Distillation", ACM Multimedia 2023.

    L = T^2 mean_n KL( q^g_n || q_n )
    q_n = softmax(f_n / T) over c != y_n,    q^g_n = softmax(f^g_n / T) over c != y_n that are not in the majority

A majority class has more samples than the mean over all classes, n_c > n / C. The student's share of a majority class
that isn't the true one is driven to 0. Where no class is left for the teacher, the authors' mask of -1000 degenerates
to a huge loss; here the row's term is 0.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
    check_counts,
    check_outputs,
    check_positive,
    check_same,
    check_targets,
    divergence,
    is_target,
    log_softmax_over,
    real_rows,
    row_mean,
    teacher_logits,
)
from fedskew.parameters import Positive, component


def label_masking_distillation(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    counts: Tensor,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """FedLMD's term, without cross-entropy.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        teacher_logits: The teacher's logits, shape `(batch, classes)`; they get no gradient.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        temperature: Divides both models' logits.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, or a temperature not above 0.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    check_same("teacher_logits", teacher_logits, logits)
    check_counts(counts, logits)
    check_positive("temperature", temperature)
    not_true = ~is_target(real_rows(targets, mask), logits.shape[1])
    taught = not_true & ~(counts > counts.mean())
    log_teacher = log_softmax_over(real_rows(teacher_logits.detach(), mask) / temperature, taught)
    log_student = log_softmax_over(real_rows(logits, mask) / temperature, not_true)
    return temperature**2 * row_mean(divergence(log_teacher, torch.where(taught, log_student, 0)), mask)


@component
class FedLMD:
    """FedLMD's term. The authors have weight 1 and temperature 1; the FedVLS paper has weight 0.1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Lu et al., ACM Multimedia 2023"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`label_masking_distillation` of the batch."""
        return label_masking_distillation(
            batch.logits, batch.targets, teacher_logits(context), context.counts, self.temperature, mask=batch.mask
        )
