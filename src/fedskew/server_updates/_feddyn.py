"""FedDyn's server: the mean of the clients' models, moved on by all that clients have ever changed.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, algorithm 1, with K clients of whom S
replied:

    h <- h - (alpha / K) sum_S (y_k - w)            w <- sum_S a_k y_k - h / alpha

alpha cancels out: with u = -h / alpha

    u <- u + (1 / K) sum_S (y_k - w)                w <- w + sum_S a_k (y_k - w) + u

so the server has no parameter that must be the clients'. u is the mean of the r_k that the clients keep (local step
`feddyn`), and where FedDyn comes to rest it is 0. a_k are 1/|S| in the paper. The model that is evaluated is w. The
mean over clients is over all of them, whatever their size, so a client that is never selected still counts in K.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.parameters import Count, component
from fedskew.server_updates._protocol import Extras, Named


@component
class FedDyn:
    """Move the model by the weighted sum of the updates, and by the mean of all that clients have changed so far.

    Attributes:
        clients: Number of all clients of the federation. Leave it out of a config: a run fills it in, and refuses
            another value.
    """

    paper: ClassVar[str] = "Acar et al., ICLR 2021"
    reads_each_update: ClassVar[bool] = True
    is_dynamic: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "local_step.not is_dynamic": "it is one half of FedDyn, and alone it is momentum that never fades; take the "
        "preset feddyn, which has both, or plain with momentum"
    }

    clients: Count | None = None

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return u = 0, the mean over all clients of the sums of their changes."""
        return {"drift": torch.zeros_like(parameters)}

    def share(self, update: Tensor, steps: int, weight: float) -> tuple[float, Extras]:
        """Return 1, and the update's part of u; ArgumentError where the number of clients is not known."""
        if self.clients is None:
            raise ArgumentError("clients: give the number of all clients, such as FedDyn(clients=100)")
        return 1.0, {"drift": update.to(torch.float64) * (1 / self.clients)}

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """See `ServerUpdate.move`."""
        drift = state["drift"] + extras["drift"]
        return (parameters + change + drift).to(parameters.dtype), {"drift": drift.to(parameters.dtype)}
