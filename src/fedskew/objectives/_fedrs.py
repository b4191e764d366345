"""FedRS: a softmax that restrains the classes that the client lacks.

Li & Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.

    L = mean_n  -log softmax(s * f_n)[y_n],    s_c = 1 where n_c > 0, alpha elsewhere

The authors' code grades the scale by the counts instead, s_c = alpha + (1 - alpha) n_c / max n (`graded`), and has a
linear layer without bias; here the whole logit is scaled, bias included. At alpha = 1 it is cross-entropy; at alpha =
0 a missing class keeps a logit of 0, so it stays in the denominator. Inference uses raw logits.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.hooks import Batch
from fedskew.objectives._cross_entropy import cross_entropy
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import check_counts, check_outputs, check_targets
from fedskew.parameters import Share, component


def fedrs(
    logits: Tensor,
    targets: Tensor,
    counts: Tensor,
    alpha: float = 0.5,
    graded: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """FedRS's restricted cross-entropy.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        alpha: Scale of a missing class's logit, in [0, 1].
        graded: Use the scale of the authors' code, which grows with the count.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, or an `alpha` out of range.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    check_counts(counts, logits)
    if not 0 <= alpha <= 1:
        raise ArgumentError(f"alpha: must be in [0, 1], got {alpha}")
    if graded:
        largest = counts.max()
        scale = alpha + (1 - alpha) * counts / torch.where(largest > 0, largest, 1)
    else:
        scale = torch.where(counts > 0, torch.ones_like(counts), alpha)
    return cross_entropy(logits * scale, targets, mask)


@component
class FedRS:
    """FedRS's restricted cross-entropy.

    Attributes:
        alpha: Scale of a missing class's logit; 0.5 in the FedEntOpt paper, 0.7 in FedVLS's.
        graded: Use the scale of the authors' code, which grows with the count.
    """

    alpha: Share = 0.5
    graded: bool = False

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = "Li & Zhan, KDD 2021"

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedrs` of the batch."""
        return fedrs(batch.logits, batch.targets, context.counts, self.alpha, self.graded, mask=batch.mask)
