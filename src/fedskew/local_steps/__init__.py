"""How a client steps: the next parameters from the present ones and their gradient."""

from fedskew.local_steps._fedprox import FedProx
from fedskew.local_steps._fedsam import FedSAM
from fedskew.local_steps._protocol import Gradient, LocalStep, StepSettings
from fedskew.local_steps._sgd import SGD

INDEX: dict[str, type] = {"sgd": SGD, "fedprox": FedProx, "fedsam": FedSAM}

__all__ = ["INDEX", "SGD", "FedProx", "FedSAM", "Gradient", "LocalStep", "StepSettings"]
