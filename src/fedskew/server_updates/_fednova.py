"""FedNova: divide each update by the steps that it took, so that clients with more steps don't dominate.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020.

    a_k = [tau_k - rho (1 - rho^tau_k) / (1 - rho)] / (1 - rho)
    w  <- w + tau_eff sum_k p_k D_k / a_k,    tau_eff = sum_k p_k a_k

a_k is what tau_k steps with momentum rho add up to. p are the weighting slot's weights, over the clients that replied.
The effective weights p_k tau_eff / a_k sum to 1 or more: where steps differ much, FedNova is also a larger server step.
With FedProx the official code shrinks a by the proximal term; here it is not changed. Buffers such as batch-norm
statistics are not normalised (some public code does that, and gets negative variances).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.momentum import fednova_normaliser
from fedskew.parameters import BelowOne, component
from fedskew.server_updates._protocol import FloatArray, as_tensor, as_weights, weighted_sum


def fednova_weights(steps: ArrayLike, weights: ArrayLike, momentum: float) -> FloatArray:
    """Return the effective weights p_k tau_eff / a_k of the updates.

    Args:
        steps: Local steps of each client, shape `(clients,)`.
        weights: Weights, shape `(clients,)`, sum 1.
        momentum: Momentum of the clients' SGD.

    Returns:
        Effective weights, shape `(clients,)`; 0 for a client that took no step. Their sum, 1 or more where every client
        moved, is the server step hidden in FedNova.

    Raises:
        ArgumentError: Wrong shapes or values; the message names the argument.
    """
    shares, taken = as_weights(weights), np.asarray(steps)
    if taken.shape != shares.shape:
        raise ArgumentError(f"steps: expected shape {shares.shape}, one for each weight, got {taken.shape}")
    normalisers = np.array([fednova_normaliser(count, momentum) for count in taken.tolist()])
    moved = normalisers > 0
    return np.where(moved, shares * (shares @ normalisers) / np.where(moved, normalisers, 1), 0)


@overload
def fednova(updates: Tensor, steps: ArrayLike, weights: ArrayLike, momentum: float) -> Tensor: ...
@overload
def fednova(updates: ArrayLike, steps: ArrayLike, weights: ArrayLike, momentum: float) -> FloatArray: ...
def fednova(updates: ArrayLike | Tensor, steps: ArrayLike, weights: ArrayLike, momentum: float) -> FloatArray | Tensor:
    """FedNova's change of the model.

    Args:
        updates: Client model minus sent model, shape `(clients, parameters)`.
        steps: As in `fednova_weights`.
        weights: As in `fednova_weights`.
        momentum: As in `fednova_weights`.

    Returns:
        The change, shape `(parameters,)`: an array for an array, a tensor of the same dtype for a tensor.

    Raises:
        ArgumentError: Wrong shapes or values, or an array of updates that is not finite.
    """
    rows = as_tensor(updates)
    change = weighted_sum(rows, fednova_weights(steps, weights, momentum))
    return change.to(rows.dtype) if isinstance(updates, Tensor) else change.numpy()


@component
class FedNova:
    """Move the model by FedNova's normalised updates.

    Attributes:
        local_momentum: Momentum of the clients' SGD; another value would normalise their updates wrongly. Leave it out
            of a config: a run fills in its `training.momentum`, and refuses another value.
    """

    local_momentum: BelowOne | None = None

    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    reads_each_update: ClassVar[bool] = True
    cost: ClassVar[Cost] = Cost(numbers=("1 up",))
    refuses: ClassVar[Mapping[str, str]] = {
        "local_step.corrects_gradients": "corrected gradients (SCAFFOLD's, FedDyn's) make up for uneven local steps "
        "already, and FedNova's normaliser is that of uncorrected SGD; take scaffold with plain, or fednova with sgd "
        "or fedprox"
    }

    def init(self, parameters: Tensor) -> None:
        """Return None: there is no state."""

    def update(
        self,
        state: None,
        parameters: Tensor,
        updates: Tensor,
        weights: NDArray[np.float64],
        steps: NDArray[np.int64],
    ) -> tuple[Tensor, None]:
        """Compute the next model; arguments as in `ServerUpdate`. ArgumentError where the momentum is not known."""
        change = weighted_sum(updates, fednova_weights(steps, weights, self._momentum))
        return (parameters + change).to(parameters.dtype), None

    def share(self, update: Tensor, steps: int) -> tuple[float, float]:
        """Return 1 / a_k and a_k, or 0 and 0 without a step; see `SummedUpdate`."""
        normaliser = fednova_normaliser(steps, self._momentum)
        return (1 / normaliser, normaliser) if normaliser > 0 else (0.0, 0.0)

    def update_from_sums(self, state: None, parameters: Tensor, change: Tensor, number: float) -> tuple[Tensor, None]:
        """Compute the next model from the sum of p_k D_k / a_k, and tau_eff; see `SummedUpdate`."""
        return (parameters + number * change).to(parameters.dtype), None

    @property
    def _momentum(self) -> float:
        if self.local_momentum is None:
            raise ArgumentError("local_momentum: give that of the clients' SGD, such as FedNova(local_momentum=0.9)")
        return self.local_momentum
