"""FedVLS: calibrate by the client's label prior, distil its vacant classes, suppress its logits.

Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025.

    L       = L_cal + 0.1 L_dis + 0.005 L_logit
    L_cal   = mean_n  -log softmax(f_n + ln(p + eps))[y_n]     p_c = n_c / n
    L_dis   = mean_n  KL( q^g_n || q_n )                       over n_c = 0
    L_logit = sum_c p_c ( ln sum_n exp( 1[y_n != c] h_{n,c} ) - ln N )
              sum_c p_c ln( 1/N sum_n 1[y_n != c] exp(f_{n,c}) )
              with h = f - ln(p + eps) + ln(1/C + eps)

n_c are the client's label counts, q softmaxes over its vacant classes, and sums over n are over the batch of N. The
first form of L_logit is "official", the second "printed".

Where the authors' code and the paper differ:

- the paper's eq. 3 prints L_dis with a minus sign; the code minimises the divergence, as is done here.
- the paper gives L_logit weight 1, the code 0.005. At weight 1 the printed form pushes every logit of an observed class
  down with constant force, which nothing holds against, until the client predicts vacant classes. Hence 0.005.
- the code's L_logit ("official", our default) uses prior-shifted logits, and its mask multiplies the exponent, so that
  a label's own entry stays in the sum as e^0 = 1 and bounds it below. The printed form is unbounded below; it has no
  value for a class to which every row belongs, and skips it.
- the paper has ln p, the code ln(p + 1e-9): eps is `prior_eps`, and 0 takes missing classes out exactly.
- the code leaves the teacher in training mode; here it is what the engine gives, in evaluation mode.

With no vacant class L_dis is 0. With exactly one it is 0 too, and so is its gradient: the softmax over one class is 1.
"""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedskew.hooks import Batch
from fedskew.objectives._cross_entropy import CrossEntropyOf
from fedskew.objectives._protocol import Context, Distillation, Term
from fedskew.objectives._tensors import LEAST, Change, Out, at_least_1, balanced, number_of_rows, real_rows, shares_of
from fedskew.parameters import NonNegative, component

Form = Literal["official", "printed"]


@component
class FedVLSCalibration(CrossEntropyOf):
    """FedVLS's L_cal: cross-entropy on logits shifted by the log of the client's label prior.

    Attributes:
        prior_eps: Added to the prior inside the logarithm; 0 takes missing classes out of the softmax.
    """

    prior_eps: NonNegative = 1e-9

    needs_colocation: ClassVar[bool] = True
    weakened_by: ClassVar[str] = "prior_eps"
    balances_classes: ClassVar[bool] = True
    paper: ClassVar[str] = "Guo et al., AAAI 2025"

    def change(self, counts: Tensor) -> Change:
        """See `CrossEntropyOf.change`."""
        return balanced(shares_of(counts) + self.prior_eps, self.prior_eps)


@component
class VacantDistillation(Distillation):
    """FedVLS's L_dis: distil the sent model's predictions of the client's vacant classes.

    The paper's weight is 0.1 for MNIST and CIFAR-10, 0.5 for CIFAR-100 and TinyImageNet.
    """

    paper: ClassVar[str] = "Guo et al., AAAI 2025"

    def left_out(self, batch: Batch, context: Context) -> Out:
        """See `Distillation.left_out`; the term is exactly 0, with zero gradient, where fewer than two are vacant."""
        return (held := context.counts > 0), held


@component
class Suppression(Term):
    """FedVLS's L_logit: suppress the logits that a class gets from other classes' samples.

    The authors' code has weight 0.005. Classes that the client lacks are skipped, and in the printed form classes to
    which every real row belongs.

    Attributes:
        form: "official" is the form of the authors' code, "printed" the paper's.
        prior_eps: As in fedvls_calibration; official form only.
    """

    form: Form = "official"
    prior_eps: NonNegative = 1e-9

    takes_stacks: ClassVar[bool] = True
    paper: ClassVar[str] = "Guo et al., AAAI 2025"
    default_weight: ClassVar[float] = 0.005

    def value(self, batch: Batch, context: Context) -> Tensor:
        """See `Loss.value`."""
        return self._parts(batch, context)[0]

    def slope(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor]:
        """See `Sloped.slope`."""
        value, slopes, at = self._parts(batch, context)
        return value, slopes.scatter(-1, at, 0)

    def _parts(self, batch: Batch, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value, its slopes by all exponents, and each row's class, which has none."""
        prior, shift = context.of_counts(self._of_counts)
        at = real_rows(batch.targets, batch.mask).unsqueeze(-1)
        exponents = (batch.logits + shift).scatter(-1, at, 0.0 if self.form == "official" else LEAST)
        log_rows: Any = math.log(batch.logits.shape[-2])
        if batch.mask is not None:
            exponents = torch.where(batch.mask.unsqueeze(-1), exponents, LEAST)
            log_rows = at_least_1(number_of_rows(exponents, batch.mask)).log()
        if batch.mask is not None or self.form == "printed":  # without classes that no row reaches
            prior = torch.where((exponents > LEAST).any(-2, keepdim=True), prior, 0)
        log_shares = exponents.log_softmax(-2)
        slopes = log_shares.detach().exp() * prior
        # An exponent less its log-share is the log of the class's sum, in every row; its slopes add up to its prior.
        return (slopes * (exponents - log_shares - log_rows)).sum((-2, -1)), slopes, at

    def _of_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes' shares, and what is added to the logits."""
        prior = shares_of(counts)
        if self.form == "printed":
            return prior, torch.zeros_like(prior)
        own = torch.where(counts > 0, prior + self.prior_eps, 1).log()
        return prior, math.log(1 / counts.shape[-1] + self.prior_eps) - own
