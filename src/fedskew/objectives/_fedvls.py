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

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.hooks import Batch
from fedskew.objectives._protocol import Context
from fedskew.objectives._tensors import (
    check_counts,
    check_non_negative,
    check_outputs,
    check_same,
    check_targets,
    cross_entropy_over,
    divergence,
    is_target,
    log_softmax_over,
    logsumexp_over,
    real_rows,
    row_mean,
    teacher_logits,
)
from fedskew.parameters import NonNegative, component

Form = Literal["official", "printed"]


def fedvls_calibration(
    logits: Tensor, targets: Tensor, counts: Tensor, prior_eps: float = 1e-9, mask: Tensor | None = None
) -> Tensor:
    """Cross-entropy on logits shifted by the log of the client's label prior (L_cal).

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        prior_eps: Added to the prior inside the logarithm; 0 takes missing classes out of the softmax (a target of such
            a class then has infinite loss).
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, or a negative `prior_eps`.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    check_counts(counts, logits)
    check_non_negative("prior_eps", prior_eps)
    shifted = _prior(counts) + prior_eps
    possible = shifted > 0
    log_prior = torch.where(possible, shifted, 1).log()
    return cross_entropy_over(logits + log_prior, targets, possible, mask)


def fedvls_distillation(logits: Tensor, teacher_logits: Tensor, counts: Tensor, mask: Tensor | None = None) -> Tensor:
    """Divergence from the teacher among the client's vacant classes (L_dis), at temperature 1.

    Args:
        logits: Logits, shape `(batch, classes)`.
        teacher_logits: The teacher's logits, shape `(batch, classes)`; they get no gradient.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The mean over the real rows, 0-d; exactly 0, with zero gradient, where fewer than two classes are vacant.

    Raises:
        ArgumentError: A wrong shape or dtype.
    """
    check_outputs("logits", logits, mask)
    check_same("teacher_logits", teacher_logits, logits)
    check_counts(counts, logits)
    vacant = ~(counts > 0)
    log_teacher = log_softmax_over(real_rows(teacher_logits.detach(), mask), vacant)
    log_student = log_softmax_over(real_rows(logits, mask), vacant)
    return row_mean(divergence(log_teacher, log_student), mask)


def fedvls_suppression(
    logits: Tensor,
    targets: Tensor,
    counts: Tensor,
    form: Form = "official",
    prior_eps: float = 1e-9,
    mask: Tensor | None = None,
) -> Tensor:
    """Log-mean-exp of the logits that other classes' samples give each class, weighted by the prior (L_logit).

    It has no outer weight (the authors' code multiplies it by 0.005). It couples the rows of a batch, so it is not a
    mean of single rows. Classes that the client lacks are skipped, and in the printed form classes to which every real
    row belongs.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        form: "official" (the authors' code) or "printed" (the paper's eq. 4 to 6).
        prior_eps: As in `fedvls_calibration`; official form only.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The term, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, an unknown form, or a negative `prior_eps`.
    """
    check_outputs("logits", logits, mask)
    check_targets(targets, logits, "logits")
    check_counts(counts, logits)
    check_non_negative("prior_eps", prior_eps)
    if form not in ("official", "printed"):
        raise ArgumentError(f"form: expected 'official' or 'printed', got {form!r}")
    prior = _prior(counts)
    logits, targets = real_rows(logits, mask), real_rows(targets, mask)
    classes = logits.shape[1]
    others = ~is_target(targets, classes)
    real = torch.ones_like(others) if mask is None else mask.unsqueeze(1).expand_as(others)
    if form == "official":
        shift = math.log(1 / classes + prior_eps) - torch.where(counts > 0, prior + prior_eps, 1).log()
        exponents, in_sum = torch.where(others, logits + shift, 0), real
    else:
        exponents, in_sum = logits, real & others
    rows = real[:, 0].sum().clamp(min=1).to(logits.dtype)
    log_mean = logsumexp_over(exponents, in_sum, dim=0) - rows.log()
    return torch.where(in_sum.any(dim=0), prior * log_mean, 0).sum()


def fedvls(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    counts: Tensor,
    distillation_weight: float = 0.1,
    suppression_weight: float = 0.005,
    form: Form = "official",
    prior_eps: float = 1e-9,
    mask: Tensor | None = None,
) -> Tensor:
    """FedVLS's whole loss: the weighted sum of calibration, vacant distillation and suppression.

    Args:
        logits: Logits, shape `(batch, classes)`.
        targets: Class ids, shape `(batch,)`, int64.
        teacher_logits: The teacher's logits, shape `(batch, classes)`; they get no gradient.
        counts: The client's label counts, shape `(classes,)`, in the logits' dtype.
        distillation_weight: 0.1 in the paper for MNIST and CIFAR-10, 0.5 for CIFAR-100 and TinyImageNet.
        suppression_weight: 0.005 in the authors' code; the paper says 1 (see the module's docstring).
        form: As in `fedvls_suppression`.
        prior_eps: As in `fedvls_calibration`.
        mask: True at real rows, shape `(batch,)`, bool.

    Returns:
        The loss, 0-d.

    Raises:
        ArgumentError: A wrong shape or dtype, an unknown form, or a negative `prior_eps`.
    """
    calibration = fedvls_calibration(logits, targets, counts, prior_eps, mask)
    distillation = fedvls_distillation(logits, teacher_logits, counts, mask)
    suppression = fedvls_suppression(logits, targets, counts, form, prior_eps, mask)
    return calibration + distillation_weight * distillation + suppression_weight * suppression


@component
class FedVLSCalibration:
    """FedVLS's L_cal: cross-entropy on logits shifted by the log of the client's label prior.

    Attributes:
        prior_eps: Added to the prior inside the logarithm; 0 takes missing classes out of the softmax.
    """

    prior_eps: NonNegative = 1e-9

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()
    needs_colocation: ClassVar[bool] = True
    paper: ClassVar[str] = "Guo et al., AAAI 2025"

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedvls_calibration` of the batch."""
        return fedvls_calibration(batch.logits, batch.targets, context.counts, self.prior_eps, mask=batch.mask)


@component
class VacantDistillation:
    """FedVLS's L_dis: distil the sent model's predictions of the client's vacant classes.

    The paper's weight is 0.1, or 0.5.
    """

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Guo et al., AAAI 2025"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedvls_distillation` of the batch."""
        return fedvls_distillation(batch.logits, teacher_logits(context), context.counts, mask=batch.mask)


@component
class Suppression:
    """FedVLS's L_logit: suppress the logits that a class gets from other classes' samples.

    The authors' code has weight 0.005.

    Attributes:
        form: "official" is the form of the authors' code, "printed" the paper's.
        prior_eps: As in fedvls_calibration; official form only.
    """

    form: Form = "official"
    prior_eps: NonNegative = 1e-9

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = "Guo et al., AAAI 2025"
    default_weight: ClassVar[float] = 0.005

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedvls_suppression` of the batch."""
        return fedvls_suppression(
            batch.logits, batch.targets, context.counts, self.form, self.prior_eps, mask=batch.mask
        )


def _prior(counts: Tensor) -> Tensor:
    """Return the shares of the classes; all 0 for an empty client."""
    total = counts.sum()
    return counts / torch.where(total > 0, total, 1)
