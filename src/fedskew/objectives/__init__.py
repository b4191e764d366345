"""Objectives: what a client minimises, one classification loss plus weighted terms."""

from fedskew.hooks import Batch
from fedskew.objectives._cross_entropy import CrossEntropy
from fedskew.objectives._distillation import FedEKD, FedKD
from fedskew.objectives._feddkd import FedDKD
from fedskew.objectives._fedlc import FedLC
from fedskew.objectives._fedlmd import FedLMD
from fedskew.objectives._fedmr import FedMR
from fedskew.objectives._fedntd import FedNTD
from fedskew.objectives._fedrs import FedRS
from fedskew.objectives._fedvls import FedVLSCalibration, Suppression, VacantDistillation
from fedskew.objectives._fpl import FPL, coarsest_clusters
from fedskew.objectives._moon import MOON
from fedskew.objectives._protocol import Context, Loss, Objective

INDEX: dict[str, type] = {
    "cross_entropy": CrossEntropy,
    "fedrs": FedRS,
    "fedlc": FedLC,
    "fedvls_calibration": FedVLSCalibration,
    "vacant_distillation": VacantDistillation,
    "suppression": Suppression,
    "fedntd": FedNTD,
    "fedlmd": FedLMD,
    "fedkd": FedKD,
    "fedekd": FedEKD,
    "feddkd": FedDKD,
    "moon": MOON,
    "fedmr": FedMR,
    "fpl": FPL,
}

__all__ = [
    "FPL",
    "INDEX",
    "MOON",
    "Batch",
    "Context",
    "CrossEntropy",
    "FedDKD",
    "FedEKD",
    "FedKD",
    "FedLC",
    "FedLMD",
    "FedMR",
    "FedNTD",
    "FedRS",
    "FedVLSCalibration",
    "Loss",
    "Objective",
    "Suppression",
    "VacantDistillation",
    "coarsest_clusters",
]
