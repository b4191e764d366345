"""Cross-entropy, the loss of FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    L = mean_n  -log softmax(f_n)[y_n]

Where a sample may have several labels, or none, binary cross-entropy takes its place, one sigmoid for each label:

    L = mean_{n,c}  -w_c y_{n,c} log s(f_{n,c}) - (1 - y_{n,c}) log(1 - s(f_{n,c})),    s(f) = 1 / (1 + e^{-f})

y_{n,c} is 1 where sample n has label c; w_c is its weight (`training.class_weights`), or 1. It is PyTorch's
`BCEWithLogitsLoss` with `pos_weight` w.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Classification, Context
from fedskew.objectives._tensors import Change, by_rows, cross_entropy_slope, mean_cross_entropy, real_rows, row_mean
from fedskew.parameters import component


class CrossEntropyOf(Classification):
    """Base class of mean cross-entropies of logits that a client's label counts change."""

    takes_stacks: ClassVar[bool] = True

    def change(self, counts: Tensor) -> Change:
        """Return what the logits are multiplied by, what is added to them, and which of them the softmax leaves out."""
        return None, None, None

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        logits, _ = self._changed(batch, context)
        return mean_cross_entropy(logits, batch.targets, batch.mask, batch.class_weights)

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`."""
        logits, factor = self._changed(batch, context)
        value, gradient = cross_entropy_slope(logits, batch.targets, batch.mask, batch.class_weights)
        return value, gradient if factor is None else gradient.mul_(factor)

    def _changed(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor | None]:
        factor, added, out = context.of_counts(self.change)
        logits = batch.logits if factor is None else batch.logits * factor
        logits = logits if added is None else logits + added
        return logits if out is None else logits.masked_fill(out, -math.inf), factor


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
        logits, labels, mask = real_rows(batch.logits, batch.mask), _labels(batch), batch.mask
        losses, gradient = F.softplus(logits) - labels * logits, torch.sigmoid(logits).sub_(labels)
        if batch.class_weights is not None:
            counts_for = 1 + (batch.class_weights - 1) * labels
            losses, gradient = losses * counts_for, gradient.mul_(counts_for)
        return row_mean(losses.mean(-1), mask), by_rows(gradient.div_(logits.shape[-1]), mask)


@component
class CrossEntropy(CrossEntropyOf):
    """Mean cross-entropy on raw logits, the loss of FedAvg."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    of_findings: ClassVar[type[SigmoidCrossEntropy]] = SigmoidCrossEntropy
    weighs_classes: ClassVar[bool] = True


def _labels(batch: Batch) -> Tensor:
    """Return 0 and 1 for each label, `(..., batch, classes)`."""
    numbers = torch.arange(batch.logits.shape[-1], device=batch.targets.device)
    return (batch.targets.unsqueeze(-1) >> numbers & 1).to(batch.logits.dtype)
