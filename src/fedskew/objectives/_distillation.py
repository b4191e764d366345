"""Distillation from the sent model: over all classes (FedKD), or over the classes that the client holds (FedEKD).

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; the two names are FedVLS's (its table 13).

    L = T^2 mean_n KL( q^g_n || q_n ),    q = softmax(f / T) over the given classes
"""

from typing import ClassVar

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Distillation
from fedskew.objectives._tensors import Out
from fedskew.parameters import Positive, component


@component
class FedKD(Distillation):
    """Distillation from the sent model over all classes. The FedVLS comparison has weight 0.1 and temperature 1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    paper: ClassVar[str] = "Hinton et al., 2015"


@component
class FedEKD(Distillation):
    """Distillation from the sent model over the classes that the client holds. Weight and temperature as for FedKD.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    paper: ClassVar[str] = "Guo et al., AAAI 2025"

    def left_out(self, batch: Batch, context: Context) -> Out:
        """See `Distillation.left_out`."""
        return (missing := ~(context.counts > 0)), missing
