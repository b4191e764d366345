"""What a client minimises: one classification loss plus weighted terms."""

from fedskew.objectives._cross_entropy import CrossEntropy
from fedskew.objectives._fedlc import FedLC
from fedskew.objectives._fedvls import FedVLSCalibration, Suppression, VacantDistillation
from fedskew.objectives._protocol import Batch, Context, Loss, Objective

INDEX: dict[str, type] = {
    "cross_entropy": CrossEntropy,
    "fedlc": FedLC,
    "fedvls_calibration": FedVLSCalibration,
    "vacant_distillation": VacantDistillation,
    "suppression": Suppression,
}

__all__ = [
    "INDEX",
    "Batch",
    "Context",
    "CrossEntropy",
    "FedLC",
    "FedVLSCalibration",
    "Loss",
    "Objective",
    "Suppression",
    "VacantDistillation",
]
