"""L-DAWA: each layer of a client counts by the cosine of its angle to the sent model's layer.

Rehman et al., "L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual
Representation Learning", ICCV 2023. With a_k the weights, w_k^l layer l of client k and w^l that of the sent model:

    delta_k^l = <w_k^l, w^l> / (|w_k^l| |w^l|)          w^l <- sum_k a_k delta_k^l w_k^l

The paper has a_k = 1/K (the weighting `uniform`), and the sum is not divided by that of the deltas, so a layer that
clients turn away from shrinks. Where a layer is 0, delta is 1. A layer is the parameters of one module.
"""

import numpy as np
import torch

from fedskew.aggregation import Aggregation
from fedskew.parameters import component


@component
class LDAWA(Aggregation):
    """Sees `sent`, the model that was sent, and `layout`, where each layer stands in it."""

    def combine(self, updates, weights, sent, layout, log):
        models, lengths = (sent + updates).double(), torch.from_numpy(weights).to(updates.device)
        combined = torch.empty_like(models[:1])
        for layer, part in layout.layers.items():
            own, common = models[:, part], sent[part].double()
            norms = own.norm(dim=1) * common.norm()
            cosines = torch.where(norms > 0, own @ common / norms.clamp(min=1e-30), 1.0)
            combined[0, part] = (lengths * cosines) @ own - common
            log(f"cosine {layer}", cosines.mean())
        return combined.to(updates.dtype), np.ones(1)
