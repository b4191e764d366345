"""FedMR: decorrelate the features within each class, so that a client's few classes don't collapse the feature space.

Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping", TMLR 2023; the intra-class
term only, as in the authors' code (the paper adds a margin between classes against global prototypes).

    L = sum_c mean_{i != j} (M_c)_{ij}^2 / (number of samples used),    M_c = X_c^T X_c

over the classes with two samples or more in the batch; X_c holds their features, centred and divided by
sqrt(unbiased variance + 1e-8). M_c isn't divided by the number of samples, so the term grows with its square.
"""

from typing import ClassVar

from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import is_real, real_rows, squared_correlations
from fedskew.parameters import component


@component
class FedMR(Term):
    """FedMR's intra-class term. It grows with the batch size: choose a small weight, 0.0001 to start with."""

    shapes_features: ClassVar[bool] = True
    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Fan et al., TMLR 2023"
    default_weight: ClassVar[float] = 1e-4

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 where no class has two samples."""
        real = is_real(batch.features, batch.mask)
        same = batch.targets.unsqueeze(-2) == batch.targets.unsqueeze(-1)
        same = same & real.unsqueeze(-2) & real.unsqueeze(-1)
        return squared_correlations(real_rows(batch.features, batch.mask), same)
