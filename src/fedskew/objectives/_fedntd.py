"""FedNTD: distil the sent model's predictions of all classes except the true one.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS 2022.

    L = T^2 mean_n KL( q^g_n || q_n ),    q = softmax(f / T) over the classes c != y_n

With two classes the term is 0: one class is left, and its share is 1.
"""

from typing import ClassVar

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Distillation
from fedskew.objectives._tensors import Out, at_target
from fedskew.parameters import Positive, component


@component
class FedNTD(Distillation):
    """FedNTD's term. The authors have weight 1 and temperature 1; the FedVLS paper has weight 0.1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    paper: ClassVar[str] = "Lee et al., NeurIPS 2022"

    def left_out(self, batch: Batch, context: Context) -> Out:
        """See `Distillation.left_out`."""
        return (own := at_target(batch)), own
