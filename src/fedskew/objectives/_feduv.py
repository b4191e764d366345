"""FedUV: two terms that make a client's outputs vary, and its features spread, as if its data were even.

Son, Kim, Chung, Huang and Liu, "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.

    L_V = mean_c max(0, C^(-1/2) - std_n softmax(f_n)_c)
    L_U = mean_{i < j} exp( -|z_i - z_j|^2 / m ),    m = median of the |z_i - z_j|^2 that aren't 0

std is the unbiased standard deviation over the batch; C^(-1/2) is what it is of a column of the identity matrix, a
batch with one sample of each of C classes. z are the features. Of an even number of distances the median is the lower
middle one, and gradients pass through it, so L_U sees no scale of the features: both as in the authors' code. The
weights are the code's, 2.5 and 0.5.

So that it can be mapped over a cohort, the median is taken from all N^2 distances in order, those that don't count
last: it lies at a place that is computed, not counted in Python.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context, Term
from fedskew.objectives._tensors import is_real, real_rows
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
        logits, mask = batch.logits, batch.mask
        shares = real_rows(real_rows(logits, mask).softmax(-1), mask)
        size = is_real(logits, mask).sum(-1)
        rows = size[..., None, None]
        centred = real_rows(shares - shares.sum(-2, keepdim=True) / rows.clamp(min=1), mask)
        variance = centred.square().sum(-2) / (rows[..., 0] - 1).clamp(min=1)
        varies = variance > 0  # a root has no gradient at 0
        spread = torch.where(varies, torch.where(varies, variance, 1).sqrt(), 0)
        lacking = (1 / math.sqrt(logits.shape[-1]) - spread).relu().mean(-1)
        return torch.where(size >= 2, lacking, 0)


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
        features, real = real_rows(batch.features, batch.mask), is_real(batch.features, batch.mask)
        # Distances don't see the origin; near it, they keep the most digits.
        rows = real.sum(-1).clamp(min=1)[..., None, None]
        centred = real_rows(features - features.detach().sum(-2, keepdim=True) / rows, batch.mask)
        products = centred @ centred.mT
        squares = products.diagonal(dim1=-2, dim2=-1)
        lengths = squares.unsqueeze(-2) + squares.unsqueeze(-1)
        distances = lengths - 2 * products
        pairs = (real.unsqueeze(-2) & real.unsqueeze(-1)).triu(diagonal=1)
        number = torch.finfo(features.dtype)
        apart = pairs & (distances > _ROUNDING * number.eps * lengths + number.tiny / number.eps)
        ordered = torch.where(apart, distances, math.inf).flatten(-2).sort().values
        count = apart.sum((-2, -1)).unsqueeze(-1)
        median = ordered.gather(-1, (count - 1).clamp(min=0) // 2)
        median = torch.where(count > 0, median, 1).unsqueeze(-1)
        closeness = (-torch.where(apart, distances, 0) / median).exp()
        return torch.where(pairs, closeness, 0).sum((-2, -1)) / pairs.sum((-2, -1)).clamp(min=1)
