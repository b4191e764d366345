"""FedUV: two terms that make a client's outputs vary, and its features spread, as if its data were even.

Son, Kim, Chung, Huang and Liu, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.

    L_V = mean_c max(0, C^(-1/2) - std_n softmax(f_n)_c)
    L_U = mean_{i < j} exp( -|z_i - z_j|^2 / m ),    m = median of the |z_i - z_j|^2 that aren't 0

std is the unbiased standard deviation over the batch; C^(-1/2) is what it is of a column of the identity matrix, a
batch with one sample of each of C classes. z are the features. Of an even number of distances the median is the lower
middle one, and gradients pass through it, so L_U sees no scale of the features: both as in the authors' code. The
weights are the code's, 2.5 and 0.5.

So that it can be mapped over a cohort, the median is taken of all N^2 distances, where those that don't count are NaN.
Each pair is there twice, which changes neither median nor mean.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import at_least_1, number_of_rows, real_pairs, real_rows
from fedskew.parameters import component

_ROUNDING = 64
"""Squared distances up to this many units of rounding of the lengths that they are computed from count as 0."""


@component
class ClassifierVariance(Term):
    """FedUV's variance term: each class's share should vary over a batch as it would over one of all classes."""

    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Son et al., CVPR 2024"
    default_weight: ClassVar[float] = 2.5

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 where there are fewer than two rows."""
        return self._parts(batch)[0]

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`."""
        value, rows, shares, centred, others, root, lacking = self._parts(batch)
        # What is centred has a sum of 0, but for rounding, which a small variance makes large.
        again = centred - centred.sum(-2, keepdim=True) / at_least_1(rows)
        by_shares = again * ((lacking > 0) / (root * (-others * shares.shape[-1])))
        return value, torch._softmax_backward_data(by_shares, shares, -1, shares.dtype)

    def _parts(self, batch: Batch) -> tuple[Tensor, *tuple[Any, ...]]:
        logits, mask = batch.logits, batch.mask
        shares, rows = real_rows(real_rows(logits, mask).softmax(-1), mask), number_of_rows(logits, mask)
        others = at_least_1(rows - 1)
        centred = real_rows(shares - shares.sum(-2, keepdim=True) / at_least_1(rows), mask)
        variance = centred.square().sum(-2, keepdim=True) / others
        root = variance.clamp(min=torch.finfo(logits.dtype).tiny).sqrt()  # which has no gradient at 0
        lacking = (1 / math.sqrt(logits.shape[-1]) - root).relu()
        return (lacking * (rows >= 2)).mean((-2, -1)), rows, shares, centred, others, root, lacking


@component
class Uniformity(Term):
    """FedUV's uniformity term: features should lie apart from each other, whatever their classes."""

    shapes_features: ClassVar[bool] = True
    takes_findings: ClassVar[bool] = True
    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Son et al., CVPR 2024"
    default_weight: ClassVar[float] = 0.5

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`; 0 where there is no pair, and a pair of equal features has closeness 1."""
        return self._parts(batch)[0]

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, None, Tensor]:
        """See `Sloped.slope`."""
        value, number, centred, apart, at, median, exponents, closeness = self._parts(batch)
        pulls = torch.where(apart, closeness, 0)
        pulls.flatten(-2).scatter_add_(-1, at, (closeness * exponents).sum((-2, -1)).unsqueeze(-1))  # the median's
        pulls = pulls + pulls.mT
        gradient = torch.addcmul(pulls @ centred, centred, pulls.sum(-1, keepdim=True), value=-1)
        return value, None, gradient / (median * (number / 2))

    def _parts(self, batch: Batch) -> tuple[Tensor, *tuple[Any, ...]]:
        features, mask, kind = real_rows(batch.features, batch.mask), batch.mask, torch.finfo(batch.features.dtype)
        rows = number_of_rows(features, mask)
        # Distances don't see the origin; near it, they keep the most digits.
        centred = real_rows(features - features.sum(-2, keepdim=True) / at_least_1(rows), mask)
        products = centred @ centred.mT
        squares = products.diagonal(dim1=-2, dim2=-1)
        lengths = squares.unsqueeze(-2) + squares.unsqueeze(-1)
        distances = lengths.sub(products, alpha=2)
        apart = real_pairs(distances.sub(lengths, alpha=_ROUNDING * kind.eps) > kind.tiny / kind.eps, mask)
        median, at = torch.where(apart, distances, math.nan).flatten(-2).nanmedian(-1, keepdim=True)
        median = median.nan_to_num(1).unsqueeze(-1)
        exponents = torch.where(apart, distances, 0) / -median
        closeness = real_rows(real_rows(exponents.exp(), mask).mT, mask)
        number = at_least_1(rows * (rows - 1))
        value = (closeness.sum((-2, -1), keepdim=True) - rows) / number  # without those of a row with itself, each 1
        return value.squeeze((-2, -1)), number, centred, apart, at, median, exponents, closeness
