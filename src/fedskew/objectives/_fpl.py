"""FPL: pull features towards their class's prototypes, and away from other classes'.

Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

    L = mean_n [ -log( sum_{P of class y_n} e^{cos(f_n, P) / T} / sum_P e^{cos(f_n, P) / T} )
                 + |f_n - m_{y_n}|^2 / dim ]

m_c is the mean of class c's prototypes. A row whose class has no prototype adds 0, but counts in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.objectives._arguments import check_columns, check_outputs, check_positive, check_targets
from fedskew.objectives._masked import logsumexp_over, real_rows, row_mean, unit_rows


def fpl(
    features: Tensor,
    targets: Tensor,
    prototypes: Mapping[int, Tensor],
    temperature: float = 0.02,
    mask: Tensor | None = None,
) -> Tensor:
    """FPL's two terms, InfoNCE and squared distance, without cross-entropy, mean over the real rows, 0-d.

    `features`: `(batch, dim)`; `targets`: `(batch,)` int64; `prototypes`: class id to its prototypes, `(count, dim)`,
    in the features' dtype, without gradient; 0 where there is none; `mask`: `(batch,)` bool, True at real rows. Raises
    ArgumentError for a wrong shape or dtype, a negative class id, or a temperature not above 0.
    """
    check_outputs("features", features, mask)
    known = sorted(prototypes)
    for label in known:
        of_class = prototypes[label]
        if label < 0:
            raise ArgumentError(f"prototypes: expected class ids, 0 or above, as keys, got {label}")
        check_columns(f"prototypes[{label}]", of_class, features, "features")
    values = torch.cat([features.new_zeros(1, features.shape[1]), *(prototypes[label] for label in known)])
    sizes = [1, *(len(prototypes[label]) for label in known)]
    classes = torch.tensor([-1, *known]).repeat_interleave(torch.tensor(sizes)).to(features.device)
    return fpl_flat(features, targets, values, classes, temperature, mask)


def fpl_flat(
    features: Tensor,
    targets: Tensor,
    values: Tensor,
    classes: Tensor,
    temperature: float = 0.02,
    mask: Tensor | None = None,
) -> Tensor:
    """`fpl` with the prototypes as one matrix, `(prototypes, dim)`, and their class ids, `(prototypes,)` int64.

    A class id of -1 marks a row of padding. At least one row is needed, which may be padding.
    """
    check_outputs("features", features, mask)
    check_targets(targets, features, "features")
    check_positive("temperature", temperature)
    features, targets, values = real_rows(features, mask), real_rows(targets, mask), values.detach()
    own = targets.unsqueeze(1) == classes
    known = own.any(dim=1)
    closeness = unit_rows(features) @ unit_rows(values).T / temperature
    everyone = (classes >= 0).expand_as(own)
    contrast = logsumexp_over(closeness, everyone, dim=1) - logsumexp_over(closeness, own, dim=1)
    mean = own.to(values.dtype) @ values / own.sum(dim=1, keepdim=True).clamp(min=1)
    distance = (features - mean).square().mean(dim=1)
    return row_mean(torch.where(known, contrast + distance, 0), mask)
