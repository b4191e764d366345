"""FedDecorr: decorrelate the features of a batch, so that a client's few classes don't collapse the feature space.

Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning", ICLR 2023.

    L = mean_{i != j} M_{ij}^2 / N,    M = X^T X

X holds the features of a batch of N, centred and divided by sqrt(unbiased variance + 1e-8). This is the authors' code.
M isn't divided by N, so the term grows with the batch size: it is about N times the mean square of the correlations
that the paper prints. FedMR's term is the same within each class.
"""

from typing import ClassVar

from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import is_real, real_rows, squared_correlations
from fedskew.parameters import component


@component
class FedDecorr(Term):
    """FedDecorr's term. It grows with the batch size: the authors' weight, 0.1, is for batches of 64."""

    shapes_features: ClassVar[bool] = True
    takes_findings: ClassVar[bool] = True
    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Shi et al., ICLR 2023"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 where there is one row."""
        real = is_real(batch.features, batch.mask)
        return squared_correlations(real_rows(batch.features, batch.mask), real.unsqueeze(-2) & real.unsqueeze(-1))
