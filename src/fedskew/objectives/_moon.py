"""MOON: pull a client's representation towards the sent model's and away from its own previous one.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021.

    L = mean_n  -log( e^{cos(z, z_global) / tau} / (e^{cos(z, z_global) / tau} + e^{cos(z, z_previous) / tau}) )

At its first participation a client has no previous model: the authors skip the term then, and so should the caller.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedskew.objectives._arguments import check_outputs, check_positive, check_same
from fedskew.objectives._masked import real_rows, row_mean, unit_rows


def moon(
    z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5, mask: Tensor | None = None
) -> Tensor:
    """MOON's model-contrastive term, without cross-entropy, mean over the real rows, 0-d.

    `z`, `z_global`, `z_previous`: what the projection head gives in the client's model, the sent model and the client's
    previous model, `(batch, dim)`; the latter two get no gradient. A zero vector has cosine 0 with everything. `mask`:
    `(batch,)` bool, True at real rows. Raises ArgumentError for a wrong shape or dtype, or a temperature not above 0.
    """
    check_outputs("z", z, mask)
    check_same("z_global", z_global, z)
    check_same("z_previous", z_previous, z)
    check_positive("temperature", temperature)
    ours, sent, previous = (unit_rows(real_rows(rows, mask)) for rows in (z, z_global.detach(), z_previous.detach()))
    return row_mean(F.softplus(((previous - sent) * ours).sum(dim=1) / temperature), mask)
