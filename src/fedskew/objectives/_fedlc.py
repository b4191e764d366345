"""FedLC: logits calibrated by a margin that grows as a class gets rarer at the client.

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.

    L = mean_n  -log( e^{g_{n,y_n}} / sum_{c: n_c > 0} e^{g_{n,c}} ),    g_{n,c} = f_{n,c} - tau n_c^(-1/4)

The paper's formula leaves the true class out of the denominator, which makes the loss unbounded below; public
implementations keep it in, as is done here (`exclude_target` gives the printed formula, for study). A class that the
client lacks has an infinite margin: it is taken out of the softmax, so no gradient reaches its logit.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
    check_counts,
    check_non_negative,
    check_outputs,
    check_targets,
    cross_entropy_over,
    is_target,
    logsumexp_over,
    real_rows,
    row_mean,
)
from fedskew.parameters import NonNegative, component


def fedlc(
    logits: Tensor,
    targets: Tensor,
    counts: Tensor,
    tau: float = 1.0,
    exclude_target: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """FedLC's calibrated cross-entropy.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64, of classes with a positive count (else the loss is infinite).
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        tau: Strength of the margin.
        exclude_target: Leave the true class out of the denominator; 0 where the client has no other class.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, or a negative `tau`.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    check_counts(counts, logits)
    check_non_negative("tau", tau)
    observed = counts > 0
    calibrated = logits - tau * torch.where(observed, counts, 1).pow(-0.25)
    if not exclude_target:
        return cross_entropy_over(calibrated, targets, observed, mask)
    calibrated, targets = real_rows(calibrated, mask), real_rows(targets, mask)
    others = observed & ~is_target(targets, logits.shape[1])
    own = calibrated.gather(1, targets.unsqueeze(1)).squeeze(1)
    return row_mean(torch.where(others.any(dim=1), logsumexp_over(calibrated, others, dim=1) - own, 0), mask)


@component
class FedLC:
    """FedLC's calibrated cross-entropy.

    Attributes:
        tau: Strength of the margin; 1 in the FedEntOpt paper, 0.5 in FedVLS's.
        exclude_target: Leave the true class out of the denominator, as the paper prints it.
    """

    tau: NonNegative = 1.0
    exclude_target: bool = False

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()
    needs_colocation: ClassVar[bool] = True
    paper: ClassVar[str] = "Zhang et al., ICML 2022"

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedlc` of the batch."""
        return fedlc(batch.logits, batch.targets, context.counts, self.tau, self.exclude_target, mask=batch.mask)
