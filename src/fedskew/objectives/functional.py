"""The losses as pure functions of tensors: each a mean over the real rows, 0-d, without outer weight."""

from fedskew.objectives._cross_entropy import cross_entropy
from fedskew.objectives._fedlc import fedlc
from fedskew.objectives._fedvls import fedvls, fedvls_calibration, fedvls_distillation, fedvls_suppression

__all__ = [
    "cross_entropy",
    "fedlc",
    "fedvls",
    "fedvls_calibration",
    "fedvls_distillation",
    "fedvls_suppression",
]
