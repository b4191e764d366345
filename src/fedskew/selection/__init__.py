"""Selection: which clients train in a round."""

from fedskew.selection._fedcbs import FedCBS
from fedskew.selection._fedentopt import FedEntOpt as FedEntOpt
from fedskew.selection._fedentopt import FedEntOptTarget
from fedskew.selection._given import Function, Recorded
from fedskew.selection._greedy_kl import GreedyKL as GreedyKL
from fedskew.selection._protocol import Selection as Selection
from fedskew.selection._seol_kim import SeolKim as SeolKim
from fedskew.selection._uniform import Uniform as Uniform

INDEX: dict[str, type] = {
    "uniform": Uniform,
    "fedentopt": FedEntOpt,
    "fedentopt_target": FedEntOptTarget,
    "seol_kim": SeolKim,
    "greedy_kl": GreedyKL,
    "fedcbs": FedCBS,
    "recorded": Recorded,
    "function": Function,
}
"""Selections by their name in a config."""
