"""Weighting: how much each client's update counts."""

from fedskew.weighting._afl import AFL, afl_update
from fedskew.weighting._fedavg import FedAvg, fedavg
from fedskew.weighting._feddisco import FedDisco
from fedskew.weighting._fedla import FedLA, fedla
from fedskew.weighting._fedpals import FedPALS, fedpals, fedpals_solve, fedpals_strength
from fedskew.weighting._protocol import Answered, BySums, Facts, Weighting
from fedskew.weighting._uniform import Uniform, uniform

INDEX: dict[str, type] = {
    "fedavg": FedAvg,
    "uniform": Uniform,
    "fedla": FedLA,
    "fedpals": FedPALS,
    "afl": AFL,
    "feddisco": FedDisco,
}

__all__ = [
    "AFL",
    "INDEX",
    "Answered",
    "BySums",
    "Facts",
    "FedAvg",
    "Uniform",
    "Weighting",
    "afl_update",
    "fedavg",
    "fedla",
    "fedpals",
    "fedpals_solve",
    "fedpals_strength",
    "uniform",
]
