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


@component
class CrossEntropy(Classification):
    """Mean cross-entropy on raw logits, the loss of FedAvg."""

    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    of_findings: ClassVar[type[SigmoidCrossEntropy]] = SigmoidCrossEntropy
    weighs_classes: ClassVar[bool] = True

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        return mean_cross_entropy(batch.logits, batch.targets, batch.mask, batch.class_weights)

    def slope(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the value and its gradient by the logits; see `Sloped`."""
        return cross_entropy_slope(batch.logits, batch.targets, batch.mask, batch.class_weights)
