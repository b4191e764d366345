"""FedRoD's generic model: cross-entropy balanced by the client's label counts.

Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

    L = mean_n  -log softmax(f_n + ln max(n_c, m))[y_n]

n_c are the client's label counts; m = 0 takes classes that the client lacks out of the softmax, as in the paper's
formula, and no gradient reaches their logits (public codes have 0, 1, and 1e-12 of the shares). It is the balanced
softmax of Ren et al., NeurIPS 2020; with m = 0 it is FedVLS's calibration with its `prior_eps` at 0.

FedRoD's other half, a head of its own for each client, reads the features without sending a gradient into them, so the
model of all clients is the same with it and without. fedskew evaluates that model, and has no such heads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
    check_counts,
    check_non_negative,
    check_outputs,
    check_targets,
    cross_entropy_over,
)
from fedskew.parameters import NonNegative, component


def balanced_cross_entropy(
    logits: Tensor, targets: Tensor, counts: Tensor, least: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Cross-entropy on logits to which the logs of the client's label counts are added.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        least: Number of samples that a class with fewer is taken to have; at 0 missing classes are
            taken out of the softmax (a target of such a class then has infinite loss).
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, or a negative `least`.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    check_counts(counts, logits)
    check_non_negative("least", least)
    counted = counts.clamp(min=least)
    possible = counted > 0
    return cross_entropy_over(logits + torch.where(possible, counted, 1).log(), targets, possible, mask)


@component
class FedRoD:
    """Cross-entropy balanced by the client's label counts, which is what FedRoD's generic model is trained with.

    Attributes:
        least: Number of samples that a class with fewer is taken to have; 0 takes classes that
            the client lacks out of the softmax.
    """

    least: NonNegative = 0.0

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()
    needs_colocation: ClassVar[bool] = True
    paper: ClassVar[str] = "Chen & Chao, ICLR 2022"

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`balanced_cross_entropy` of the batch."""
        return balanced_cross_entropy(batch.logits, batch.targets, context.counts, self.least, mask=batch.mask)
