"""Server updates: how the weighted updates of a round move the model."""

from fedskew.hooks import fednova_normaliser as fednova_normaliser
from fedskew.server_updates._adaptive import FedAdagrad, FedAdam, FedYogi
from fedskew.server_updates._fedacg import FedACG
from fedskew.server_updates._feddyn import FedDyn
from fedskew.server_updates._fedexp import FedEXP
from fedskew.server_updates._fedexp import fedexp_step as fedexp_step
from fedskew.server_updates._fednova import FedNova
from fedskew.server_updates._fednova import fednova as fednova
from fedskew.server_updates._plain import Plain as Plain
from fedskew.server_updates._protocol import ServerUpdate as ServerUpdate
from fedskew.server_updates._protocol import weighted_sum as weighted_sum

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
