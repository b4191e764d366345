"""Who has waited longest trains: a selection by what it keeps at the server, the age of each client's last update.

Yang, Arafa, Quek & Poor, "Age-Based Scheduling Policy for Federated Learning in Mobile Edge Networks", ICASSP 2020,
without its wireless channels. With age a_k of client k, 1 before the first round:

    the cohort has the largest a_k, ties at random          a_k <- 1 for who replied, a_k + 1 for all others
"""

from typing import ClassVar

import numpy as np
import torch

from fedskew.hooks import Hooks
from fedskew.parameters import component


@component
class ByAge(Hooks):
    """Sees `kept` in `select`, which `end_round` renews."""

    needs_label_counts: ClassVar[bool] = False

    def init(self, counts):
        return None

    def init_server(self, parameters, clients):
        return {"age": torch.ones(clients)}

    def select(self, state, counts, size, rng, kept, log):
        ages, order = kept["age"].numpy(), rng.permutation(len(counts))
        log("longest wait", ages.max())
        return order[np.argsort(-ages[order], kind="stable")][:size], state

    def end_round(self, state, end):
        ages = state["age"] + 1
        ages[torch.from_numpy(end.ids)] = 1
        return {"age": ages}
