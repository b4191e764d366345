"""FedETF: the last layer is fixed to a simplex, and the loss is balanced by the client's label counts.

Li, Shang, He, Lin and Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier", ICCV 2023. C classes, n_c samples of class c at the client, z the network's C outputs:

    V       = sqrt(C / (C - 1)) P (I - 1 1' / C),    P random and orthogonal, C x C
    f_{n,c} = s cos(z_n, V_c)
    L       = mean_n  -log softmax(f_n + ln max(n_c, m))[y_n]

V is the same at all clients and never trained; s is learnt, and averaged with the rest. As in the authors' code, z is
what the network's last layer gives (their projection to C dimensions), s begins at 1, and a class that the client lacks
counts as one sample (m = 1, `least`), so that it is pushed down a little. The paper prints n_c, which takes such a
class out of the softmax (m = 0): no gradient reaches its logit. Inference takes f.

The loss by itself is FedRoD's, with m = 1.
"""

from typing import ClassVar

from torch import Generator, Tensor, nn

from fedskew.hooks import Hooks
from fedskew.models import OnSimplex
from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._tensors import Change, balanced
from fedskew.parameters import NonNegative, Positive, component


@component
class FedETF(CrossEntropyOf, Hooks):
    """Balanced cross-entropy on a network whose last layer is a fixed simplex.

    Attributes:
        scale: What the cosines are multiplied by, to begin with; it is learnt (1 in most of the authors'
            networks, 10 in their small one).
        least: Number of samples that a class with fewer is taken to have; 0 takes classes that
            the client lacks out of the softmax.
    """

    scale: Positive = 1.0
    least: NonNegative = 1.0

    paper: ClassVar[str] = "Li et al., ICCV 2023"
    balances_classes: ClassVar[bool] = True
    keeps_state: ClassVar[bool] = False
    fixes_last_layer: ClassVar[bool] = True

    def change(self, counts: Tensor) -> Change:
        """See `CrossEntropyOf.change`."""
        return balanced(counts.clamp(min=self.least), self.least)

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """Return the network with a fixed simplex behind its outputs; ArgumentError where it has no head."""
        return OnSimplex(module, self.scale, learnt=True, generator=generator)
