"""Who trains this round: one method per file."""

from __future__ import annotations

from fedskew.selection._fedentopt import FedEntOpt, FedEntOptState
from fedskew.selection._greedy_kl import GreedyKL
from fedskew.selection._protocol import Selection
from fedskew.selection._seol_kim import SeolKim, SeolKimState
from fedskew.selection._uniform import Uniform

INDEX: dict[str, type] = {
    "uniform": Uniform,
    "fedentopt": FedEntOpt,
    "seol_kim": SeolKim,
    "greedy_kl": GreedyKL,
}
"""The selections by the name that a config gives them."""

__all__ = [
    "INDEX",
    "FedEntOpt",
    "FedEntOptState",
    "GreedyKL",
    "Selection",
    "SeolKim",
    "SeolKimState",
    "Uniform",
]
