"""Norm clipping: no update is longer than a bound.

Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019:

    D_k <- D_k min(1, bound / ||D_k||)

The bound is fixed, or a quantile of the norms of the round's updates, or the smaller of both. The quantile is taken
over clients regardless of their weights, without updates of length 0; between two norms it is the smaller one, so that
of two clients the longer update is cut to the shorter. Clipping bounds how far a client can pull, not in which
direction: an update with its sign flipped stays flipped.

A fixed bound applies to the trainable parameters. Buffers, whose scale differs, are clipped by the quantile of the
norms of their own changes; by the median if no quantile is given.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedskew.aggregation._protocol import Robust
from fedskew.parameters import FloatArray, Positive, Share, component


@component
class NormClipping(Robust):
    """The weighted mean of updates that are no longer than a bound.

    Attributes:
        quantile: The bound is this quantile of the norms of the round's updates; not set: their median, unless `bound`
            is given.
        bound: Largest norm of an update.
    """

    paper: ClassVar[str] = "Sun et al., 2019"

    quantile: Share | None = None
    bound: Positive | None = None

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Return the clipped updates, and the weights as they are; see `Aggregation.combine`."""
        return self._clipped(updates, self.bound), weights

    def combine_buffers(self, changes: Tensor, weights: FloatArray, **seen: Any) -> tuple[Tensor, FloatArray]:
        """Return the changes clipped by their own quantile, and the weights as they are."""
        return self._clipped(changes, None), weights

    def _clipped(self, updates: Tensor, bound: float | None) -> Tensor:
        norms = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64).cpu().numpy()
        limit = np.inf if bound is None else bound
        if (norms > 0).any() and (bound is None or self.quantile is not None):
            share = 0.5 if self.quantile is None else self.quantile
            limit = min(limit, float(np.quantile(norms[norms > 0], share, method="lower")))
        if not (norms > limit).any():
            return updates
        factors = torch.from_numpy(np.minimum(1, limit / np.maximum(norms, limit))).to(updates)
        return updates * factors[:, None]
