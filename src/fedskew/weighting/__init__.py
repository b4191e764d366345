"""Weighting: how much each client's update counts."""

from fedskew.weighting._afl import AFL as AFL
from fedskew.weighting._afl import afl_update as afl_update
from fedskew.weighting._fedavg import FedAvg as FedAvg
from fedskew.weighting._fedavg import fedavg as fedavg
from fedskew.weighting._feddisco import FedDisco
from fedskew.weighting._fedla import FedLA
from fedskew.weighting._fedla import fedla as fedla
from fedskew.weighting._fedpals import FedPALS
from fedskew.weighting._fedpals import fedpals as fedpals
from fedskew.weighting._fedpals import fedpals_solve as fedpals_solve
from fedskew.weighting._fedpals import fedpals_strength as fedpals_strength
from fedskew.weighting._protocol import Answered as Answered
from fedskew.weighting._protocol import BySums as BySums
from fedskew.weighting._protocol import Facts as Facts
from fedskew.weighting._protocol import Weighting as Weighting
from fedskew.weighting._uniform import Uniform as Uniform
from fedskew.weighting._uniform import uniform as uniform

INDEX: dict[str, type] = {
    "fedavg": FedAvg,
    "uniform": Uniform,
    "fedla": FedLA,
    "fedpals": FedPALS,
    "afl": AFL,
    "feddisco": FedDisco,
}
