"""Cross-entropy, the loss of FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    L = mean_n  -log softmax(f_n)[y_n]
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import check_outputs, check_targets, real_rows, row_mean
from fedskew.parameters import component


def cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean cross-entropy.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    if mask is None:
        return F.cross_entropy(logits, targets)
    return row_mean(F.cross_entropy(real_rows(logits, mask), real_rows(targets, mask), reduction="none"), mask)


@component
class CrossEntropy:
    """Mean cross-entropy on raw logits, the loss of FedAvg."""

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`cross_entropy` of the batch."""
        return cross_entropy(batch.logits, batch.targets, mask=batch.mask)
