"""Server updates: how the weighted updates of a round move the model."""

from fedskew.hooks import fednova_normaliser
from fedskew.server_updates._adaptive import FedAdagrad, FedAdam, FedYogi
from fedskew.server_updates._fedacg import FedACG
from fedskew.server_updates._feddyn import FedDyn
from fedskew.server_updates._fedexp import FedEXP, fedexp_step
from fedskew.server_updates._fednova import FedNova, fednova
from fedskew.server_updates._plain import Plain
from fedskew.server_updates._protocol import ServerUpdate, weighted_sum

INDEX: dict[str, type] = {
    "plain": Plain,
    "fednova": FedNova,
    "fedexp": FedEXP,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "feddyn": FedDyn,
    "fedacg": FedACG,
}

__all__ = ["INDEX", "Plain", "ServerUpdate", "fedexp_step", "fednova", "fednova_normaliser", "weighted_sum"]
