"""FedMR: decorrelate the features within each class, so that a client's few classes don't collapse the feature space.

Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping", TMLR 2023; the intra-class
term only, as in the authors' code (the paper adds a margin between classes against global prototypes).

    L = sum_c mean_{i != j} (M_c)_{ij}^2 / (number of samples used),    M_c = X_c^T X_c

over the classes with two samples or more in the batch; X_c holds their features, centred and divided by
sqrt(unbiased variance + 1e-8). M_c isn't divided by the number of samples, so the term grows with its square.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import check_outputs, check_targets, real_rows
from fedskew.parameters import component


def fedmr(features: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """FedMR's intra-class term, without cross-entropy.

    It couples the rows of a batch, so it is not a mean of single rows.

    Args:
        features: What the last linear layer receives, shape `(batch, dim)`.
        targets: Class ids, shape `(batch,)`, int64.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The term, 0-d; 0 where no class has two samples.

    Raises:
        ArgumentError: A wrong shape or dtype.
    """
    check_outputs("features", features, mask)
    check_targets(targets, features, "features")
    features, dim = real_rows(features, mask), features.shape[1]
    same = targets.unsqueeze(0) == targets.unsqueeze(1)
    if mask is not None:
        same = same & mask.unsqueeze(0) & mask.unsqueeze(1)
    # Sums over a row's class are products with this matrix: no list of classes, which would differ from batch to batch.
    of_class = same.to(features.dtype)
    size = of_class.sum(dim=1, keepdim=True)
    used = size >= 2
    centred = torch.where(used, features - of_class @ features / size.clamp(min=1), 0)
    variance = of_class @ centred.square() / (size - 1).clamp(min=1)
    scaled = centred / (variance + 1e-8).sqrt()
    # The squares of all entries of X^T X sum to those of X X^T; each class's diagonal is seen once by each of its rows.
    squares = ((scaled @ scaled.T) * of_class).square().sum()
    diagonals = ((of_class @ scaled.square()).square() / size.clamp(min=1)).sum()
    return (squares - diagonals) / max(dim * (dim - 1), 1) / used.sum().clamp(min=1)


@component
class FedMR:
    """FedMR's intra-class term. It grows with the batch size: choose a small weight, 0.0001 to start with."""

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = "Fan et al., TMLR 2023"
    default_weight: ClassVar[float] = 1e-4

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedmr` of the batch."""
        return fedmr(batch.features, batch.targets, mask=batch.mask)
