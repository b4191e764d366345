"""The plain server update, with a learning rate and momentum of the server.

With the defaults it is FedAvg's (McMahan et al., AISTATS 2017): the model moves by the weighted sum of the updates.
With momentum it is FedAvgM (Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019):

    v <- momentum * v + sum_k a_k D_k        w <- w + lr * v
"""

from typing import ClassVar

import torch
from torch import Tensor

from fedskew.parameters import BelowOne, Positive, component
from fedskew.server_updates._protocol import Extras, Named


@component
class Plain:
    """Move the model by `lr` times the weighted sum of the updates.

    Attributes:
        lr: Learning rate of the server.
        momentum: Momentum of the server, from 0 to below 1.
    """

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017; Hsu et al., 2019"

    lr: Positive = 1.0
    momentum: BelowOne = 0.0

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return a velocity of zeros, v, in the model's dtype; nothing without momentum."""
        return {"velocity": torch.zeros_like(parameters)} if self.momentum else {}

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """See `ServerUpdate.move`."""
        if state:
            change += self.momentum * state["velocity"].to(torch.float64)
            state = {"velocity": change.to(parameters.dtype, copy=True)}
        # In place: fresh memory for wide models takes as long as the sum itself.
        return change.mul_(self.lr).add_(parameters).to(parameters.dtype), state
