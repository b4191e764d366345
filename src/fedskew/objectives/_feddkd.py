"""FedDKD: distillation split into the true class against the others, and the others among themselves.

Zhao et al., "Decoupled Knowledge Distillation", CVPR 2022; as a federated term, the FedVLS paper's table 13.

    L    = alpha TCKD + beta NCKD
    TCKD = T^2 mean_n KL( (p^g_y, 1 - p^g_y) || (p_y, 1 - p_y) ),    p = softmax(f / T)
    NCKD = T^2 mean_n KL( q^g_n || q_n ),                            q = softmax(f / T) over c != y_n

At T = 1 distillation over all classes is TCKD plus the mean of (1 - p^g_y) times the row of NCKD. The authors' library
has alpha 1, beta 8, T 4 and a warm-up of 20 epochs; FedVLS gives none, so alpha, beta and T are 1 here, without
warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._fedntd import not_true_distillation
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
    check_non_negative,
    divergence,
    is_target,
    logsumexp_over,
    real_rows,
    row_mean,
    teacher_logits,
)
from fedskew.parameters import NonNegative, Positive, component


def decoupled_distillation(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    target_weight: float = 1.0,
    rest_weight: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """DKD's two terms, weighted, without cross-entropy.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        teacher_logits: The teacher's logits, shape `(batch, classes)`; they get no gradient.
        temperature: Divides both models' logits.
        target_weight: The paper's alpha.
        rest_weight: The paper's beta.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, a temperature not above 0, or a negative weight.
    """
    check_non_negative("target_weight", target_weight)
    check_non_negative("rest_weight", rest_weight)
    rest = not_true_distillation(logits, targets, teacher_logits, temperature, mask)
    targets = real_rows(targets, mask)
    log_teacher = _against_the_rest(real_rows(teacher_logits.detach(), mask) / temperature, targets)
    log_student = _against_the_rest(real_rows(logits, mask) / temperature, targets)
    target = temperature**2 * row_mean(divergence(log_teacher, log_student), mask)
    return target_weight * target + rest_weight * rest


@component
class FedDKD:
    """DKD's two terms from the sent model. The FedVLS comparison has the outer weight 0.1.

    Attributes:
        temperature: Divides both models' logits.
        target_weight: Weight of the true class against the others (alpha).
        rest_weight: Weight of the others among themselves (beta).
    """

    temperature: Positive = 1.0
    target_weight: NonNegative = 1.0
    rest_weight: NonNegative = 1.0

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Zhao et al., CVPR 2022"
    default_weight: ClassVar[float] = 0.1
    warns: ClassVar[Mapping[str, str]] = {
        "objective.fedntd": "FedNTD's term is the second half of FedDKD's, so it would count twice; raise rest_weight"
    }

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`decoupled_distillation` of the batch."""
        return decoupled_distillation(
            batch.logits,
            batch.targets,
            teacher_logits(context),
            self.temperature,
            self.target_weight,
            self.rest_weight,
            mask=batch.mask,
        )


def _against_the_rest(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities of each row's class and of all others together, `(batch, 2)`."""
    log_shares = logits.log_softmax(dim=1)
    own = log_shares.gather(1, targets.unsqueeze(1)).squeeze(1)
    # Summed from the others' logs: 1 - p has no digits left where p is near 1.
    others = logsumexp_over(log_shares, ~is_target(targets, logits.shape[1]), dim=1)
    return torch.stack([own, others], dim=1)
