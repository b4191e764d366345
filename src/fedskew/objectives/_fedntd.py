"""FedNTD: distil the sent model's predictions of all classes except the true one.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS 2022.

    L = T^2 mean_n KL( q^g_n || q_n ),    q = softmax(f / T) over the classes c != y_n

With two classes the term is 0: one class is left, and its share is 1.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
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


def not_true_distillation(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """FedNTD's term, without cross-entropy.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        teacher_logits: The teacher's logits, shape `(batch, classes)`; they get no gradient.
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
    check_positive("temperature", temperature)
    not_true = ~is_target(real_rows(targets, mask), logits.shape[1])
    log_teacher = log_softmax_over(real_rows(teacher_logits.detach(), mask) / temperature, not_true)
    log_student = log_softmax_over(real_rows(logits, mask) / temperature, not_true)
    return temperature**2 * row_mean(divergence(log_teacher, log_student), mask)


@component
class FedNTD:
    """FedNTD's term. The authors have weight 1 and temperature 1; the FedVLS paper has weight 0.1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Lee et al., NeurIPS 2022"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`not_true_distillation` of the batch."""
        return not_true_distillation(
            batch.logits, batch.targets, teacher_logits(context), self.temperature, mask=batch.mask
        )
