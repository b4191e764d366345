"""FedRoD's generic model: cross-entropy balanced by the client's label counts.

Chen & Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

    L = mean_n  -log softmax(f_n + ln max(n_c, m))[y_n]

n_c are the client's label counts; m = 0 takes classes that the client lacks out of the softmax, as in the paper's
formula, and no gradient reaches their logits (public codes have 0, 1, and 1e-12 of the shares). It is the balanced
softmax of Ren et al., NeurIPS 2020; with m = 0 it is FedVLS's calibration with its `prior_eps` at 0.

FedRoD's other half, a head of its own for each client, reads the features without sending a gradient into them, so the
model of all clients is the same with it and without. fedskew evaluates that model, and has no such heads.
"""

from typing import ClassVar

from torch import Tensor

from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._tensors import Change, balanced
from fedskew.parameters import NonNegative, component


@component
class FedRoD(CrossEntropyOf):
    """Cross-entropy balanced by the client's label counts, which is what FedRoD's generic model is trained with.

    Attributes:
        least: Number of samples that a class with fewer is taken to have; 0 takes classes that
            the client lacks out of the softmax.
    """

    least: NonNegative = 0.0

    needs_colocation: ClassVar[bool] = True
    weakened_by: ClassVar[str] = "least"
    paper: ClassVar[str] = "Chen & Chao, ICLR 2022"
    balances_classes: ClassVar[bool] = True

    def change(self, counts: Tensor) -> Change:
        """See `CrossEntropyOf.change`."""
        return balanced(counts.clamp(min=self.least), self.least)
