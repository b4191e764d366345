"""FedDecorr: decorrelate the features of a batch, so that a client's few classes don't collapse the feature space.

Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning", ICLR 2023.

    L = mean_{i != j} M_{ij}^2 / N,    M = X^T X

X holds the features of a batch of N, centred and divided by sqrt(unbiased variance + 1e-8). This is the authors' code.
M isn't divided by N, so the term grows with the batch size: it is about N times the mean square of the correlations
that the paper prints. FedMR's term is the same within each class.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import at_least_1, real_rows
from fedskew.parameters import component


class Decorrelation(Term):
    """Base class of terms that decorrelate features within groups of rows: the sum over the groups of the mean square
    of the off-diagonal entries of X^T X, by the number of rows used; a group of one row is not used."""

    shapes_features: ClassVar[bool] = True
    takes_stacks: ClassVar[bool] = True

    def groups(self, batch: Batch) -> Tensor | None:
        """Return which rows are of one group, and no padding, `(..., batch, batch)` bool; None: all."""
        raise NotImplementedError

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 where no group has two rows."""
        return self._parts(batch)[0]

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, None, Tensor]:
        """See `Sloped.slope`."""
        value, number, sums, size, others, root, scaled, by_scaled, each = self._parts(batch)
        gradient = torch.addcmul(by_scaled, scaled, sums(each) / others, value=-1) * (root / (number / 4))
        # Its sum over a group is 0, as that of X is, but for rounding, which a small variance makes large.
        return value, None, gradient - sums(gradient) / size

    def _parts(self, batch: Batch) -> tuple[Tensor, *tuple[Any, ...]]:
        features, same = real_rows(batch.features, batch.mask), self.groups(batch)
        size: Any = features.shape[-2]
        dim = features.shape[-1]
        if same is None:
            of_group, used = None, size
            sums: Any = partial(torch.sum, dim=-2, keepdim=True)
        else:
            # Sums over a row's group are products with a matrix: no list of groups, which would differ from batch to
            # batch. A row that is alone is 0 when it is centred.
            of_group = same.to(features.dtype)
            sums, size = partial(torch.matmul, of_group), of_group.sum(-1, keepdim=True).clamp(min=1)
            used = (size >= 2).sum((-2, -1), keepdim=True, dtype=size.dtype)
        others, number = at_least_1(size - 1), at_least_1(used) * max(dim * (dim - 1), 1)
        centred = features - sums(features) / size
        root = (sums(centred.square()) / others + 1e-8).rsqrt()
        scaled = centred * root
        # A quarter of the gradient, by X, of the sum of the squares of all entries of X^T X (it is that of X X^T) but
        # the diagonal's. This sum is of the fourth degree in X, and so the sum of X times the quarter.
        products = scaled @ scaled.mT
        by_all = (products if of_group is None else products * of_group) @ scaled
        by_scaled = torch.addcmul(by_all, scaled, sums(scaled.square()), value=-1)
        each = by_scaled * scaled
        value = (each.sum((-2, -1), keepdim=True) / number).squeeze((-2, -1))
        return value, number, sums, size, others, root, scaled, by_scaled, each


@component
class FedDecorr(Decorrelation):
    """FedDecorr's term. It grows with the batch size: the authors' weight, 0.1, is for batches of 64."""

    takes_findings: ClassVar[bool] = True
    paper: ClassVar[str] = "Shi et al., ICLR 2023"
    default_weight: ClassVar[float] = 0.1

    def groups(self, batch: Batch) -> Tensor | None:
        """See `Decorrelation.groups`."""
        return None if (mask := batch.mask) is None else mask.unsqueeze(-2) & mask.unsqueeze(-1)
