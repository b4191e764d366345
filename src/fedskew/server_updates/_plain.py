"""The plain server update, with a learning rate and momentum of the server.

With the defaults it is FedAvg's (McMahan et al., AISTATS 2017): the model moves by the weighted sum of the updates.
With momentum it is FedAvgM (Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019):

    v <- momentum * v + sum_k a_k D_k        w <- w + lr * v
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.parameters import BelowOne, Positive, component
from fedskew.server_updates._protocol import weighted_sum


@dataclass(frozen=True)
class PlainState:
    """State of the plain server update.

    Attributes:
        velocity: The server's momentum, shape `(parameters,)`, in the model's dtype.
    """

    velocity: Tensor


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

    def init(self, parameters: Tensor) -> PlainState | None:
        """Return a velocity of zeros; None without momentum."""
        return PlainState(torch.zeros_like(parameters)) if self.momentum else None

    def update(
        self,
        state: PlainState | None,
        parameters: Tensor,
        updates: Tensor,
        weights: NDArray[np.float64],
        steps: NDArray[np.int64],
    ) -> tuple[Tensor, PlainState | None]:
        """Compute the next model and state; arguments as in `ServerUpdate`. `steps` is not used."""
        change = weighted_sum(updates, weights)
        if state is not None:
            change += self.momentum * state.velocity.to(torch.float64)
            state = PlainState(change.to(parameters.dtype, copy=True))
        # In place: fresh memory for wide models takes as long as the sum itself.
        return change.mul_(self.lr).add_(parameters).to(parameters.dtype), state
