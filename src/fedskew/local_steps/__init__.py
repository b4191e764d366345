"""Local steps: how a client gets its next parameters from the present ones and their gradient."""

from fedskew.local_steps._fedbabu import FedBABU
from fedskew.local_steps._feddyn import FedDyn
from fedskew.local_steps._fedgf import FedGF
from fedskew.local_steps._fedprox import FedProx
from fedskew.local_steps._fedsam import FedSAM
from fedskew.local_steps._optimizers import SGD, corrected
from fedskew.local_steps._protocol import (
    Adam,
    Correction,
    Gradient,
    LocalStep,
    StepSettings,
    steps_in_place,
    takes_rows,
)
from fedskew.local_steps._scaffold import Scaffold

INDEX: dict[str, type] = {
    "sgd": SGD,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedsam": FedSAM,
    "fedgf": FedGF,
    "feddyn": FedDyn,
    "fedbabu": FedBABU,
}

__all__ = [
    "INDEX",
    "SGD",
    "Adam",
    "Correction",
    "Gradient",
    "LocalStep",
    "StepSettings",
    "corrected",
    "steps_in_place",
    "takes_rows",
]
