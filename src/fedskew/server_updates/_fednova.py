"""FedNova: divide each update by the steps that it took, so that clients with more steps don't dominate.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020.

    a_k = [tau_k - rho (1 - rho^tau_k) / (1 - rho)] / (1 - rho)
    w  <- w + tau_eff sum_k p_k D_k / a_k,    tau_eff = sum_k p_k a_k

a_k is what tau_k steps with momentum rho add up to. p are the weighting slot's weights, over the clients that replied.
The effective weights p_k tau_eff / a_k sum to 1 or more: where steps differ much, FedNova is also a larger server step.
With FedProx the official code shrinks a by the proximal term; here it is not changed. Buffers such as batch-norm
statistics are not normalised (some public code does that, and gets negative variances).
"""

from collections.abc import Mapping
from typing import ClassVar, overload

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.hooks import fednova_normaliser
from fedskew.labels import as_amounts
from fedskew.parameters import BelowOne, FloatArray, component
from fedskew.server_updates._protocol import Extras, Named, as_tensor, weighted_sum


@overload
def fednova(updates: Tensor, steps: ArrayLike, weights: ArrayLike, momentum: float) -> Tensor: ...
@overload
def fednova(updates: ArrayLike, steps: ArrayLike, weights: ArrayLike, momentum: float) -> FloatArray: ...
def fednova(updates: ArrayLike | Tensor, steps: ArrayLike, weights: ArrayLike, momentum: float) -> FloatArray | Tensor:
    """FedNova's change of the model, `(parameters,)`: an array for an array, a tensor of its dtype for a tensor.

    `updates` are client models minus the sent one, `(clients, parameters)`; `weights` sum to 1; `momentum` is that of
    the clients' SGD.
    """
    shares, taken, rows = as_amounts(weights, "weights", ("updates",)), np.asarray(steps), as_tensor(updates)
    if taken.shape != shares.shape:
        raise ArgumentError(f"steps: expected shape {shares.shape}, one for each weight, got {taken.shape}")
    amounts = np.array([fednova_normaliser(count, momentum) for count in taken.tolist()])
    moved = amounts > 0
    change = weighted_sum(rows, np.where(moved, shares * (shares @ amounts) / np.where(moved, amounts, 1), 0))
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
        "or fedprox",
        "training.adapts_rates": "its normaliser counts the gradients that steps of SGD add up to, and steps of Adam "
        "are no sums of gradients; set training.optimizer = 'sgd', or take plain or fedexp",
        "training.keeps_momentum": "its normaliser counts momentum from zero; leave out training.keep_optimizer",
    }

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return nothing: there is no state."""
        return {}

    def share(self, update: Tensor, steps: int, weight: float) -> tuple[float, Extras]:
        """Return 1 / a_k, and p_k a_k; 0 and 0 without a step. ArgumentError where the momentum is not known."""
        if self.local_momentum is None:
            raise ArgumentError("local_momentum: give that of the clients' SGD, such as FedNova(local_momentum=0.9)")
        amount = fednova_normaliser(steps, self.local_momentum)
        return (1 / amount if amount > 0 else 0.0), {"steps": weight * amount}

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """See `ServerUpdate.move`; the sum of `steps` is tau_eff."""
        return (parameters + extras["steps"] * change).to(parameters.dtype), state
