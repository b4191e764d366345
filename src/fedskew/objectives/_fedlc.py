"""FedLC: logits calibrated by a margin that grows as a class gets rarer at the client.

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022.

    L = mean_n  -log( e^{g_{n,y_n}} / sum_{c: n_c > 0} e^{g_{n,c}} ),    g_{n,c} = f_{n,c} - tau n_c^(-1/4)

The paper's formula leaves the true class out of the denominator, which makes the loss unbounded below; public
implementations keep it in, as is done here (`exclude_target` gives the printed formula, for study). A class that the
client lacks has an infinite margin: no gradient reaches its logit. With a `floor`, an addition, it has a finite one.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._protocol import Classification, Context
from fedskew.objectives._tensors import cross_entropy_over, logsumexp_over, not_true, real_rows, row_mean
from fedskew.parameters import NonNegative, Share, component


@component
class FedLC(Classification):
    """FedLC's calibrated cross-entropy.

    Attributes:
        tau: Strength of the margin; 1 in the FedEntOpt paper, 0.5 in FedVLS's.
        exclude_target: Leave the true class out of the denominator, as printed; 0 where the client has no other.
        floor: The least that a class counts as, in samples, up to 1; 0: one without samples is masked.
    """

    tau: NonNegative = 1.0
    exclude_target: bool = False
    floor: Share = 0.0

    needs_colocation: ClassVar[bool] = True
    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Zhang et al., ICML 2022"
    balances_classes: ClassVar[bool] = True

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        observed = (counts := context.counts.clamp(min=self.floor)) > 0
        calibrated = batch.logits - self.tau * torch.where(observed, counts, 1).pow(-0.25)
        if not self.exclude_target:
            return cross_entropy_over(calibrated, batch.targets, observed, batch.mask)
        calibrated, targets = real_rows(calibrated, batch.mask), real_rows(batch.targets, batch.mask)
        others = observed & not_true(batch)
        own = calibrated.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        margin = logsumexp_over(calibrated, others, dim=-1) - own
        return row_mean(torch.where(others.any(dim=-1), margin, 0), batch.mask)
