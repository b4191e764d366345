"""The protocol of a server update, and the weighted sum of updates that all of them move by."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.models import FlatModel
from fedskew.parameters import FloatArray

Named = Mapping[str, Tensor]
Extras = Mapping[str, Any]

PART = 1 << 16


class ServerUpdate(Protocol):
    """A component of the server-update slot: a frozen dataclass of hyper-parameters.

    It moves the trainable parameters by a sum over clients; the engine averages buffers (batch-norm statistics) by the
    same weights. A run fills in its parameters `local_momentum` (the momentum of the clients' SGD) and `clients` (the
    number of all clients), if it has them. One that needs more of each client than its weighted update has also

        share(update, steps, weight) -> (factor, extras)

    which is called for a client's update (`(parameters,)`), the local steps that it took, and its weight (the weights
    sum to 1): the sum has `weight * factor` times the update, with a factor from 0 to 1, and `extras`, numbers by name,
    which are added up as they are. It then declares `reads_each_update`.
    """

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the state before the first round, tensors by name of any shape, for the initial `(parameters,)`."""

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """Compute the next model.

        Args:
            parameters: The model that was sent, shape `(parameters,)`; not to be written to.
            change: The weighted sum of the updates (client model minus sent model), shape `(parameters,)`, float64; it
                may be written to.
            extras: The sums of what `share` gave; empty without it.

        Returns:
            The next model, shape `(parameters,)`, and the next state.
        """


def weighted_sum(updates: Tensor, weights: FloatArray, total: Tensor | None = None) -> Tensor:
    """Return the sum of `weights_k * updates_k` in float64, shape `(parameters,)`, added in the order of the rows.

    The bits are the same whatever the layout or the number of threads: a matrix product would let the linear-algebra
    library choose the order of additions; here every operation is one rounding of one element. `updates` has the shape
    `(answered, parameters)`, `weights` `(answered,)`; ArgumentError for another shape or dtype. With a `total`, they
    are added to it.
    """
    if updates.ndim != 2 or not updates.is_floating_point():
        raise ArgumentError(
            "updates: expected a float tensor of shape (answered, parameters), "
            f"got {updates.dtype} {tuple(updates.shape)}"
        )
    if weights.shape != updates.shape[:1]:
        raise ArgumentError(f"weights: expected shape ({updates.shape[0]},), one for each update, got {weights.shape}")
    if total is None:
        total = torch.zeros(updates.shape[1], dtype=torch.float64, device=updates.device)
    if FlatModel.add_rows(total, updates, weights):
        return total
    factors = torch.tensor(weights, dtype=torch.float64, device=updates.device).unsqueeze(1)
    # Parts that stay in the cache, or that a GPU has room for; the same bits.
    part = max(1, (PART if updates.device.type == "cpu" else 1 << 24) // max(1, len(updates)))
    for at in range(0, updates.shape[1], part):
        share = total[at : at + part]
        for row in updates[:, at : at + part].to(torch.float64, copy=True).mul_(factors):
            share += row
    return total


def as_tensor(updates: ArrayLike | Tensor) -> Tensor:
    """Return updates as a tensor; ArgumentError for an array whose values are not all finite."""
    if isinstance(updates, Tensor):
        return updates
    array = np.asarray(updates, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ArgumentError("updates: must be finite; leave out the clients that diverged")
    return torch.tensor(array)
