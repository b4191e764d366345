"""FedLMD: distil the sent model's predictions of the classes of which the client has few samples.

Lu et al., "Federated Learning with Label-Masking Distillation", ACM Multimedia 2023.

    L = T^2 mean_n KL( q^g_n || q_n )
    q_n = softmax(f_n / T) over c != y_n,    q^g_n = softmax(f^g_n / T) over c != y_n that are not in the majority

A majority class has more samples than the mean over all classes, n_c > n / C. The student's share of a majority class
that isn't the true one is driven to 0. Where no class is left for the teacher, the authors' mask of -1000 degenerates
to a huge loss; here the row's term is 0.
"""

from typing import ClassVar

from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Distillation
from fedskew.objectives._tensors import Out, at_target
from fedskew.parameters import Positive, component


@component
class FedLMD(Distillation):
    """FedLMD's term. The authors have weight 1 and temperature 1; the FedVLS paper has weight 0.1.

    Attributes:
        temperature: Divides both models' logits.
    """

    temperature: Positive = 1.0

    paper: ClassVar[str] = "Lu et al., ACM Multimedia 2023"

    def left_out(self, batch: Batch, context: Context) -> Out:
        """See `Distillation.left_out`; where none is left for the teacher, none is for the client."""
        own = at_target(batch)
        of_teacher = own | context.of_counts(_majority)
        return own | of_teacher.all(-1, keepdim=True), of_teacher


def _majority(counts: Tensor) -> Tensor:
    return counts > counts.mean(-1, keepdim=True)
