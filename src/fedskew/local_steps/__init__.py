"""Local steps: how a client gets its next parameters from the present ones and their gradient."""

from fedskew.local_steps._fedbabu import FedBABU
from fedskew.local_steps._feddyn import FedDyn
from fedskew.local_steps._fedgf import FedGF
from fedskew.local_steps._fedprox import FedProx
from fedskew.local_steps._fedsam import FedSAM
from fedskew.local_steps._optimizers import SGD as SGD
from fedskew.local_steps._optimizers import corrected as corrected
from fedskew.local_steps._protocol import Adam as Adam
from fedskew.local_steps._protocol import Correction as Correction
from fedskew.local_steps._protocol import Gradient as Gradient
from fedskew.local_steps._protocol import LocalStep as LocalStep
from fedskew.local_steps._protocol import StepSettings as StepSettings
from fedskew.local_steps._protocol import steps_in_place as steps_in_place
from fedskew.local_steps._protocol import takes_rows as takes_rows
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
