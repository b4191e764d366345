"""FedGELA: the last layer is fixed to a simplex, whose corners each client stretches by its label counts.

Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data", NeurIPS 2023. With the
simplex V and the network's outputs z as in FedETF, and n_c of the client's n samples in class c:

    f_{n,c} = s cos(z_n, V_c)
    L       = mean_n  -log softmax(Phi f_n)[y_n],    Phi_c = C n_c / n

The logit of a class that the client lacks is 0, so it stays in the denominator and no gradient reaches it; classes that
the client has many samples of get the room. Inference takes f.

s = 1 / T is fixed; T = 0.2 is the default of the authors' code. The code also has two more layers before the simplex,
512 dimensions instead of C, and for `--proxy etf` batch norm in place of the paper's features of fixed length; here
the features have fixed length, and C dimensions hold C corners.
"""

from typing import ClassVar

from torch import Generator, Tensor, nn

from fedskew.hooks import Hooks
from fedskew.models import OnSimplex
from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._tensors import Change, shares_of
from fedskew.parameters import Positive, component


@component
class FedGELA(CrossEntropyOf, Hooks):
    """Cross-entropy on a network whose last layer is a fixed simplex, stretched by the client's label counts.

    Attributes:
        scale: What the cosines are multiplied by: one by the authors' temperature of 0.2.
    """

    scale: Positive = 5.0

    paper: ClassVar[str] = "Fan et al., NeurIPS 2023"
    keeps_state: ClassVar[bool] = False
    fixes_last_layer: ClassVar[bool] = True
    weighs_classes: ClassVar[bool] = True

    def change(self, counts: Tensor) -> Change:
        """See `CrossEntropyOf.change`."""
        return counts.shape[-1] * shares_of(counts), None, None

    def adapt(self, module: nn.Module, generator: Generator) -> nn.Module:
        """Return the network with a fixed simplex behind its outputs; ArgumentError where it has no head."""
        return OnSimplex(module, self.scale, learnt=False, generator=generator)
