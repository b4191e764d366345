"""The losses as functions of tensors: the mean over the real rows of a batch, 0-d, without outer weight.

`logits` and `teacher_logits` are `(batch, classes)`, and the teacher's get no gradient; `targets` are class ids,
`(batch,)` int64; `counts` are one client's, `(classes,)`, in the logits' dtype; `mask` is True at real rows, `(batch,)`
bool. A wrong shape or dtype, or a number out of range, raises ArgumentError. Formulas and parameters are those of the
component that each names.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.hooks import Batch
from fedskew.models import Outputs
from fedskew.objectives._cross_entropy import CrossEntropy
from fedskew.objectives._distillation import FedEKD, FedKD
from fedskew.objectives._feddkd import FedDKD
from fedskew.objectives._fedlc import FedLC
from fedskew.objectives._fedlmd import FedLMD
from fedskew.objectives._fedmr import FedMR
from fedskew.objectives._fedntd import FedNTD
from fedskew.objectives._fedrs import FedRS
from fedskew.objectives._fedvls import FedVLSCalibration, Form, Suppression, VacantDistillation
from fedskew.objectives._fpl import CLASSES, FPL, VALUES
from fedskew.objectives._moon import MOON
from fedskew.objectives._protocol import Context, Loss

Mask: TypeAlias = Tensor | None


def cross_entropy(logits: Tensor, targets: Tensor, mask: Mask = None) -> Tensor:
    """Mean cross-entropy (`CrossEntropy`)."""
    return _value(CrossEntropy(), logits, targets, mask)


def fedrs(
    logits: Tensor, targets: Tensor, counts: Tensor, alpha: float = 0.5, graded: bool = False, mask: Mask = None
) -> Tensor:
    """FedRS's restricted cross-entropy (`FedRS`)."""
    return _value(FedRS(alpha, graded), logits, targets, mask, counts)


def fedlc(
    logits: Tensor, targets: Tensor, counts: Tensor, tau: float = 1.0, exclude_target: bool = False, mask: Mask = None
) -> Tensor:
    """FedLC's calibrated cross-entropy (`FedLC`); infinite for a target whose count is 0."""
    return _value(FedLC(tau, exclude_target), logits, targets, mask, counts)


def fedvls_calibration(
    logits: Tensor, targets: Tensor, counts: Tensor, prior_eps: float = 1e-9, mask: Mask = None
) -> Tensor:
    """FedVLS's L_cal (`FedVLSCalibration`); infinite for a target whose count is 0 if `prior_eps` is 0."""
    return _value(FedVLSCalibration(prior_eps), logits, targets, mask, counts)


def fedvls_distillation(logits: Tensor, teacher_logits: Tensor, counts: Tensor, mask: Mask = None) -> Tensor:
    """FedVLS's L_dis (`VacantDistillation`): exactly 0, with zero gradient, with fewer than two vacant classes."""
    return _value(VacantDistillation(), logits, None, mask, counts, teacher_logits=teacher_logits)


def fedvls_suppression(
    logits: Tensor, targets: Tensor, counts: Tensor, form: Form = "official", prior_eps: float = 1e-9, mask: Mask = None
) -> Tensor:
    """FedVLS's L_logit (`Suppression`), unscaled; it couples the rows of a batch."""
    return _value(Suppression(form, prior_eps), logits, targets, mask, counts)


def fedvls(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    counts: Tensor,
    distillation_weight: float = 0.1,
    suppression_weight: float = 0.005,
    form: Form = "official",
    prior_eps: float = 1e-9,
    mask: Mask = None,
) -> Tensor:
    """FedVLS's whole loss: the weighted sum of calibration, vacant distillation and suppression."""
    calibration = fedvls_calibration(logits, targets, counts, prior_eps, mask)
    distilled = fedvls_distillation(logits, teacher_logits, counts, mask)
    suppression = fedvls_suppression(logits, targets, counts, form, prior_eps, mask)
    return calibration + distillation_weight * distilled + suppression_weight * suppression


def not_true_distillation(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor, temperature: float = 1.0, mask: Mask = None
) -> Tensor:
    """FedNTD's term (`FedNTD`), without cross-entropy."""
    return _value(FedNTD(temperature), logits, targets, mask, teacher_logits=teacher_logits)


def label_masking_distillation(
    logits: Tensor, targets: Tensor, teacher_logits: Tensor, counts: Tensor, temperature: float = 1.0, mask: Mask = None
) -> Tensor:
    """FedLMD's term (`FedLMD`), without cross-entropy."""
    return _value(FedLMD(temperature), logits, targets, mask, counts, teacher_logits=teacher_logits)


def distillation(
    logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, classes: Tensor | None = None, mask: Mask = None
) -> Tensor:
    """Divergence from the teacher (`FedKD`), or of some classes (`FedEKD`): ids, 1-D int64, or a mask, `(classes,)`."""
    if classes is None:
        return _value(FedKD(temperature), logits, None, mask, teacher_logits=teacher_logits)
    _check_outputs("logits", logits)
    among, count = classes, logits.shape[1]
    if isinstance(classes, Tensor) and classes.dtype == torch.int64 and classes.ndim == 1:
        among = torch.zeros(count, dtype=torch.bool, device=logits.device).index_fill(0, classes, True)
    if not (isinstance(among, Tensor) and among.dtype == torch.bool and among.shape == (count,)):
        raise ArgumentError(
            f"classes: expected class ids, 1-D int64, or a bool mask of shape ({count},), got {classes!r}"
        )
    return _value(FedEKD(temperature), logits, None, mask, among.to(logits.dtype), teacher_logits=teacher_logits)


def decoupled_distillation(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    target_weight: float = 1.0,
    rest_weight: float = 1.0,
    mask: Mask = None,
) -> Tensor:
    """DKD's two terms, weighted (`FedDKD`), without cross-entropy."""
    return _value(FedDKD(temperature, target_weight, rest_weight), logits, targets, mask, teacher_logits=teacher_logits)


def moon(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5, mask: Mask = None) -> Tensor:
    """MOON's term (`MOON`) of outputs of the projection head, `(batch, dim)`: the client's, the sent, the previous."""
    return _value(MOON(temperature), z, None, mask, name="z", z_global=z_global, z_previous=z_previous)


def fedmr(features: Tensor, targets: Tensor, mask: Mask = None) -> Tensor:
    """FedMR's intra-class term (`FedMR`) of `(batch, dim)` features; it couples the rows of a batch."""
    return _value(FedMR(), features, targets, mask, name="features")


def fpl(
    features: Tensor, targets: Tensor, prototypes: Mapping[int, Tensor], temperature: float = 0.02, mask: Mask = None
) -> Tensor:
    """FPL's two terms (`FPL`) of `(batch, dim)` features; `prototypes` are `(count, dim)` by class id."""
    _check_outputs("features", features)
    labels, width = sorted(prototypes), features.shape[1]
    for label in labels:
        rows = prototypes[label]
        if label < 0:
            raise ArgumentError(f"prototypes: expected class ids, 0 or above, as keys, got {label}")
        if not isinstance(rows, Tensor) or rows.shape[1:] != (width,) or rows.dtype != features.dtype:
            raise ArgumentError(
                f"prototypes[{label}]: expected {features.dtype} (rows, {width}) as features are, got {_kind(rows)}"
            )
    sizes = torch.tensor([1, *(len(prototypes[label]) for label in labels)])
    sent = {
        VALUES: torch.cat([features.new_zeros(1, width), *(prototypes[label] for label in labels)]),
        CLASSES: torch.tensor([-1, *labels]).repeat_interleave(sizes).to(features.device),
    }
    return _value(FPL(temperature), features, targets, mask, name="features", broadcast=sent)


def _value(
    loss: Loss,
    outputs: Tensor,
    targets: Tensor | None,
    mask: Mask,
    counts: Tensor | None = None,
    *,
    name: str = "logits",
    broadcast: Mapping[str, Tensor] | None = None,
    **others: Tensor,
) -> Tensor:
    """Return a loss's value, once the tensors fit; `others` are other models' outputs, of the shape of `outputs`."""
    _check_outputs(name, outputs)
    for rows, values, dtype in (("mask", mask, torch.bool), ("targets", targets, torch.int64)):
        if values is not None and not _is(values, outputs.shape[:1], dtype):
            raise ArgumentError(
                f"{rows}: expected one {dtype} for each row of {name}, shape ({outputs.shape[0]},), got {_kind(values)}"
            )
    for other, values in others.items():
        if not _is(values, outputs.shape, outputs.dtype):
            raise ArgumentError(f"{other}: expected {_kind(outputs)} as the first argument is, got {_kind(values)}")
    if counts is not None and not _is(counts, outputs.shape[1:], outputs.dtype):
        raise ArgumentError(
            f"counts: expected one client's counts, shape {tuple(outputs.shape[1:])} and dtype {outputs.dtype} "
            f"as the logits have, got {_kind(counts)}"
        )
    sent, previous = ([Outputs(rows, rows) for rows in others.values()] + [None] * 2)[:2]
    batch = Batch(outputs, outputs, outputs[:, 0].long() if targets is None else targets, mask)
    return loss.value(batch, Context(outputs[0] if counts is None else counts, sent, previous, broadcast or {}))


def _check_outputs(name: str, outputs: Any) -> None:
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not outputs.is_floating_point() or 0 in outputs.shape:
        raise ArgumentError(
            f"{name}: expected a non-empty float tensor of shape (batch, columns), got {_kind(outputs)}"
        )


def _is(value: object, shape: torch.Size, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dtype == dtype


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
