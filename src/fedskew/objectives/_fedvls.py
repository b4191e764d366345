"""FedVLS: calibrate by the client's label prior, distil its vacant classes, hold back its logits.

Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025.

    L       = L_cal + 0.1 L_dis + 0.005 L_logit
    L_cal   = mean_n  -log softmax(f_n + ln(p + eps))[y_n]                         p_c = n_c / n at the client
    L_dis   = mean_n  KL( q^g_n || q_n )                                           softmax over vacant classes, n_c = 0
    L_logit = sum_c p_c ( ln sum_n exp( 1[y_n != c] h_{n,c} ) - ln N )             "official"
              sum_c p_c ln( 1/N sum_n 1[y_n != c] exp(f_{n,c}) )                   "printed"
              with h = f - ln(p + eps) + ln(1/C + eps), sums over the batch of N

Where the authors' code and the paper differ:

- the paper's eq. 3 prints L_dis with a minus sign; the code, and we, minimise the divergence.
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
    """Cross-entropy on logits shifted by the log of the client's label prior (L_cal), mean over the real rows, 0-d.

    `logits`: `(batch, classes)`; `targets`: `(batch,)` int64; `counts`: the client's label counts, `(classes,)`, in the
    logits' dtype; `prior_eps`: added to the prior inside the logarithm, 0 takes missing classes out of the softmax (a
    target of such a class then has infinite loss); `mask`: `(batch,)` bool, True at real rows. Raises ArgumentError for
    a wrong shape or dtype, or a negative `prior_eps`.
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
    """Divergence from the teacher among the client's vacant classes (L_dis), mean over the real rows, 0-d.

    Temperature 1; the teacher gets no gradient. Exactly 0, with zero gradient, where fewer than two classes are vacant.

    `logits`, `teacher_logits`: `(batch, classes)`; `counts`: the client's label counts, `(classes,)`, in the logits'
    dtype; `mask`: `(batch,)` bool, True at real rows. Raises ArgumentError for a wrong shape or dtype.
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
    """The mean exponentiated logit that other classes' samples give each class, in logs, prior-weighted (L_logit), 0-d.

    Without outer weight (the authors' code multiplies it by 0.005). It couples the rows of a batch, so it isn't a mean
    of single rows. Classes that the client lacks are skipped, and in the printed form classes to which every real row
    belongs.

    `logits`: `(batch, classes)`; `targets`: `(batch,)` int64; `counts`: the client's label counts, `(classes,)`, in the
    logits' dtype; `form`: "official" (the authors' code) or "printed" (the paper's eq. 4 to 6); `prior_eps`: see
    `fedvls_calibration`, official form only; `mask`: `(batch,)` bool, True at real rows. Raises ArgumentError for a
    wrong shape or dtype, an unknown form, or a negative `prior_eps`.
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
    """FedVLS's whole loss, the weighted sum of calibration, vacant distillation and suppression, 0-d.

    `distillation_weight` is 0.1 in the paper for MNIST and CIFAR-10, 0.5 for CIFAR-100 and TinyImageNet;
    `suppression_weight` is the authors' code's 0.005 (the paper says 1; see the top of the file). Other arguments and
    errors as in `fedvls_calibration`, `fedvls_distillation` and `fedvls_suppression`.
    """
    calibration = fedvls_calibration(logits, targets, counts, prior_eps, mask)
    distillation = fedvls_distillation(logits, teacher_logits, counts, mask)
    suppression = fedvls_suppression(logits, targets, counts, form, prior_eps, mask)
    return calibration + distillation_weight * distillation + suppression_weight * suppression


@component
class FedVLSCalibration:
    """FedVLS's L_cal: cross-entropy on logits shifted by the log of the client's label prior."""

    prior_eps: NonNegative = 1e-9

    role: ClassVar[str] = "classification"
    reads: ClassVar[frozenset[str]] = frozenset()
    paper: ClassVar[str] = "Guo et al., AAAI 2025"

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedvls_calibration` of the batch."""
        return fedvls_calibration(batch.logits, batch.targets, context.counts, self.prior_eps, mask=batch.mask)


@component
class VacantDistillation:
    """FedVLS's L_dis: the sent model teaches the classes that the client lacks. The paper's weight is 0.1, or 0.5."""

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset({"teacher"})
    paper: ClassVar[str] = "Guo et al., AAAI 2025"
    default_weight: ClassVar[float] = 0.1

    def value(self, batch: Batch, context: Context) -> Tensor:
        """`fedvls_distillation` of the batch."""
        return fedvls_distillation(batch.logits, teacher_logits(context), context.counts, mask=batch.mask)


@component
class Suppression:
    """FedVLS's L_logit: hold back the logits that a class gets from other classes' samples.

    The authors' code weighs it 0.005. "official" is that code's form, "printed" the paper's.
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
    """The shares of the classes; all 0 for an empty client."""
    total = counts.sum()
    return counts / torch.where(total > 0, total, 1)
