"""FedRS: a softmax that restrains the classes that the client lacks.

Li & Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.

    L = mean_n  -log softmax(s * f_n)[y_n],    s_c = 1 where n_c > 0, alpha elsewhere

The authors' code grades the scale by the counts instead, s_c = alpha + (1 - alpha) n_c / max n (`graded`), and has a
linear layer without bias; here the whole logit is scaled, bias included. At alpha = 1 it is cross-entropy; at alpha =
0 a missing class keeps a logit of 0, so it stays in the denominator. Inference uses raw logits.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._tensors import Change
from fedskew.parameters import Share, component


@component
class FedRS(CrossEntropyOf):
    """FedRS's restricted cross-entropy.

    Attributes:
        alpha: Scale of a missing class's logit; 0.5 in the FedEntOpt paper, 0.7 in FedVLS's.
        graded: Use the scale of the authors' code, which grows with the count.
    """

    alpha: Share = 0.5
    graded: bool = False

    paper: ClassVar[str] = "Li & Zhan, KDD 2021"
    weighs_classes: ClassVar[bool] = True

    def change(self, counts: Tensor) -> Change:
        """See `CrossEntropyOf.change`."""
        if self.graded:
            largest = counts.amax(-1, keepdim=True)
            scale = self.alpha + (1 - self.alpha) * counts / torch.where(largest > 0, largest, 1)
        else:
            scale = torch.where(counts > 0, torch.ones_like(counts), self.alpha)
        return scale, None, None
