"""FedACG: clients start where the server's momentum would take the model next.

Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024, algorithm 1.

    s = w + l m                                             what the server sends
    w <- sum_k a_k y_k,     m <- l m + sum_k a_k (y_k - s)

Clients add beta ||y - s||^2 to their objective, beta 0.001 in the authors' code: that is FedProx with mu = 2 beta, and
the preset `fedacg` has both. The model of a run's state is s; w, which has no momentum in it, is evaluated and saved.
The first round's s is w. Authors and paper weigh all clients alike, on clients of equal sizes; here the weighting slot
decides. Buffers such as batch-norm statistics have no momentum; in the authors' code they do.
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.hooks import Hooks
from fedskew.parameters import BelowOne, component
from fedskew.server_updates._protocol import Extras, Named


@component
class FedACG(Hooks):
    """Move the model to the mean of the clients' models, and send the point where momentum would take it.

    Attributes:
        momentum: The paper's lambda; 0.85 in the authors' code. 0 is FedAvg.
    """

    paper: ClassVar[str] = "Kim et al., CVPR 2024"

    momentum: BelowOne = 0.85

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return m = 0."""
        return {"momentum": torch.zeros_like(parameters)}

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """Compute the model to send next; see `ServerUpdate.move`."""
        average = parameters + change
        momentum = change.add_(state["momentum"], alpha=self.momentum)
        ahead = average + self.momentum * momentum
        return ahead.to(parameters.dtype), {"momentum": momentum.to(parameters.dtype)}

    def evaluated(self, state: Named, parameters: Tensor) -> Tensor:
        """Return w, with what other components set in the model that is sent (FedNH its prototypes)."""
        return parameters - self.momentum * state["momentum"]
