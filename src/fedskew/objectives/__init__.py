"""Objectives: what a client minimises, one classification loss plus weighted terms; `INDEX` has every component."""

from fedskew.hooks import Batch as Batch
from fedskew.objectives._cross_entropy import CrossEntropy
from fedskew.objectives._distillation import FedEKD, FedKD
from fedskew.objectives._feddecorr import FedDecorr
from fedskew.objectives._feddkd import FedDKD
from fedskew.objectives._fedetf import FedETF
from fedskew.objectives._fedgela import FedGELA
from fedskew.objectives._fedlc import FedLC
from fedskew.objectives._fedlmd import FedLMD
from fedskew.objectives._fedmr import FedMR
from fedskew.objectives._fednh import FedNH
from fedskew.objectives._fedntd import FedNTD
from fedskew.objectives._fedrod import FedRoD
from fedskew.objectives._fedrs import FedRS
from fedskew.objectives._feduv import ClassifierVariance, Uniformity
from fedskew.objectives._fedvls import FedVLSCalibration, Suppression, VacantDistillation
from fedskew.objectives._fpl import FPL
from fedskew.objectives._moon import MOON
from fedskew.objectives._protocol import Context as Context
from fedskew.objectives._protocol import Loss as Loss
from fedskew.objectives._protocol import Objective as Objective

INDEX: dict[str, type] = {
    "cross_entropy": CrossEntropy,
    "fedrs": FedRS,
    "fedlc": FedLC,
    "fedvls_calibration": FedVLSCalibration,
    "fedrod": FedRoD,
    "fedetf": FedETF,
    "fedgela": FedGELA,
    "fednh": FedNH,
    "vacant_distillation": VacantDistillation,
    "suppression": Suppression,
    "fedntd": FedNTD,
    "fedlmd": FedLMD,
    "fedkd": FedKD,
    "fedekd": FedEKD,
    "feddkd": FedDKD,
    "moon": MOON,
    "fedmr": FedMR,
    "feddecorr": FedDecorr,
    "classifier_variance": ClassifierVariance,
    "uniformity": Uniformity,
    "fpl": FPL,
}
