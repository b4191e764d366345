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
from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import Change, all_but, at_target, logsumexp_over, real_rows, row_mean
from fedskew.parameters import NonNegative, Share, component


@component
class FedLC(CrossEntropyOf):
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

    @property
    def weakened_by(self) -> str:
        """The parameter that, raised, lessens what needs two classes at one client; none once it is at its most."""
        return "floor" if self.floor < 1 else ""

    def change(self, counts: Tensor) -> Change:
        """See `CrossEntropyOf.change`."""
        margins, observed = self._margins(counts)
        return None, -margins, all_but(observed)

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        if not self.exclude_target:
            return super().value(batch, context)
        margins, observed = self._margins(context.counts)
        calibrated, targets = real_rows(batch.logits - margins, batch.mask), real_rows(batch.targets, batch.mask)
        others = observed & ~at_target(batch)
        own = calibrated.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        margin = logsumexp_over(calibrated, others) - own
        return row_mean(torch.where(others.any(dim=-1), margin, 0), batch.mask)

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`; with `exclude_target` it is autograd's."""
        if not self.exclude_target:
            return super().slope(batch, context)
        with torch.enable_grad():
            logits = batch.logits.detach().requires_grad_()
            value = self.value(batch._replace(logits=logits), context)
            return value.detach(), torch.autograd.grad(value.sum(), logits)[0]

    def _margins(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return each class's margin, and which classes the client holds, or is taken to."""
        observed = (raised := counts.clamp(min=self.floor)) > 0
        return self.tau * torch.where(observed, raised, 1).pow(-0.25), observed
