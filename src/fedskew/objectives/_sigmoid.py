"""Cross-entropy of samples that may have several labels, or none: one sigmoid for each.

    L = mean_{n,c}  -w_c y_{n,c} log s(f_{n,c}) - (1 - y_{n,c}) log(1 - s(f_{n,c})),    s(f) = 1 / (1 + e^{-f})

y_{n,c} is 1 where sample n has label c; w_c is its weight (`training.class_weights`), or 1. It is PyTorch's
`BCEWithLogitsLoss` with `pos_weight` w, and takes cross-entropy's place where a sample may have several labels.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Classification, Context
from fedskew.objectives._tensors import by_rows, real_rows, row_mean
from fedskew.parameters import component


@component
class SigmoidCrossEntropy(Classification):
    """Mean binary cross-entropy on raw logits, over samples and labels; targets are bits (`Dataset.multi_label`)."""

    takes_findings: ClassVar[bool] = True

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        logits = real_rows(batch.logits, batch.mask)
        weights = batch.class_weights
        each = F.binary_cross_entropy_with_logits(logits, _labels(batch), pos_weight=weights, reduction="none")
        return row_mean(each.mean(dim=1), batch.mask)

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`."""
        logits, labels, mask = batch.logits, _labels(batch), batch.mask
        if mask is not None:
            logits = torch.where(mask.unsqueeze(-1), logits, 0)
        losses, gradient = F.softplus(logits) - labels * logits, torch.sigmoid(logits).sub_(labels)
        if batch.class_weights is not None:
            counts_for = 1 + (batch.class_weights - 1) * labels
            losses, gradient = losses * counts_for, gradient.mul_(counts_for)
        return row_mean(losses.mean(-1), mask), by_rows(gradient.div_(logits.shape[-1]), mask)


def _labels(batch: Batch) -> Tensor:
    """Return 0 and 1 for each label, `(..., batch, classes)`."""
    numbers = torch.arange(batch.logits.shape[-1], device=batch.targets.device)
    return (batch.targets.unsqueeze(-1) >> numbers & 1).to(batch.logits.dtype)
