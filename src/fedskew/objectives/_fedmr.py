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
from fedskew.objectives._feddecorr import Decorrelation
from fedskew.objectives._tensors import real_pairs
from fedskew.parameters import component


@component
class FedMR(Decorrelation):
    """FedMR's intra-class term. It grows with the batch size: choose a small weight, 0.0001 to start with."""

    paper: ClassVar[str] = "Fan et al., TMLR 2023"
    default_weight: ClassVar[float] = 1e-4

    def groups(self, batch: Batch) -> Tensor:
        """See `Decorrelation.groups`."""
        return real_pairs(batch.targets.unsqueeze(-2) == batch.targets.unsqueeze(-1), batch.mask)
