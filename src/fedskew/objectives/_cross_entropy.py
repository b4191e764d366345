"""Cross-entropy, the loss of FedAvg.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    L = mean_n  -log softmax(f_n)[y_n]

Where a sample may have several labels, or none, `SigmoidCrossEntropy` takes its place.
"""

from typing import ClassVar

from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Classification, Context
from fedskew.objectives._sigmoid import SigmoidCrossEntropy
from fedskew.objectives._tensors import cross_entropy_slope, mean_cross_entropy
from fedskew.parameters import component


class CrossEntropyOf(Classification):
    """Base class of mean cross-entropies of logits that a client's label counts change."""

    def changed(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits that the softmax sees, `(..., batch, classes)`, and their factor; None: 1."""
        return logits, None

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        logits, _ = self.changed(batch.logits, context.counts)
        return mean_cross_entropy(logits, batch.targets, batch.mask, batch.class_weights)

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`."""
        logits, factor = self.changed(batch.logits, context.counts)
        value, gradient = cross_entropy_slope(logits, batch.targets, batch.mask, batch.class_weights)
        return value, gradient if factor is None else gradient * factor


@component
class CrossEntropy(CrossEntropyOf):
    """Mean cross-entropy on raw logits, the loss of FedAvg."""

    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    of_findings: ClassVar[type[SigmoidCrossEntropy]] = SigmoidCrossEntropy
    weighs_classes: ClassVar[bool] = True
