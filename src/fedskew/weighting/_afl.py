"""AFL (Mohri et al., "Agnostic Federated Learning", ICML 2019): weights that rise where the loss is high.

    min_w max_lambda sum_k lambda_k f_k(w)          lambda on the simplex over all clients
    lambda <- projection of lambda + gamma f(w)     f_k = 0 for a client that did not reply

Each client that replied is weighed by its lambda, renormalised; lambda starts uniform. A client's loss is the mean over
all of its samples at the model that was sent. The paper's groups are domains, and so are those of the FedDG benchmark,
from which FedPALS's figures come; there the losses are taken at the next model, and clients weigh their gradients.
Under partial participation lambda grows for the clients that happen to be selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.hooks import Hooks, LocalEnd, Named, RoundEnd
from fedskew.parameters import FloatArray, NonNegative, component
from fedskew.weighting._protocol import Answered, as_shares

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, LOSS = "afl.weights", "afl.loss"


def afl_update(weights: ArrayLike, losses: ArrayLike, step_size: float) -> FloatArray:
    """AFL's next weights: the point of the simplex that is nearest to `weights + step_size * losses`.

    Args:
        weights: Weights of all clients, shape `(clients,)`, not negative, sum 1.
        losses: Their losses, shape `(clients,)`; 0 for a client that did not reply.
        step_size: The paper's gamma.
    """
    old, loss = _vector("weights", weights), _vector("losses", losses)
    if loss.shape != old.shape:
        raise ArgumentError(f"losses: expected {old.shape}, one for each weight, got {loss.shape}")
    if (old < 0).any() or not math.isclose(old.sum(), 1, abs_tol=1e-6):
        raise ArgumentError(f"weights: none may be negative and the sum must be 1, got sum {old.sum():g}")
    if not (math.isfinite(step_size) and step_size >= 0):
        raise ArgumentError(f"step_size: must be 0 or above and finite, got {step_size}")
    point = old + step_size * (loss - loss.max())  # the projection is the same, and sums stay small
    falling = np.sort(point)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    projected = np.maximum(point - excess[falling > excess][-1], 0)
    following: FloatArray = projected / projected.sum()
    return following


@component
class AFL(Hooks):
    """Weigh each client that replied by its lambda; equally where that is 0 for all of them.

    Each round costs a client one more forward pass over its samples.

    Attributes:
        step_size: The paper's gamma; 0.1 for PACS and 0.0001 for iWildCam in the FedDG benchmark.
    """

    needs_label_counts: ClassVar[bool] = False
    paper: ClassVar[str] = "Mohri et al., ICML 2019"
    cost: ClassVar[Cost] = Cost(numbers=("1 loss up",))
    warns: ClassVar[Mapping[str, str]] = {
        "selection.fixed_cohort": "AFL looks for the worst client, and never hears of those outside a cohort that is "
        "always the same; uniform and fedentopt reach every client"
    }

    step_size: NonNegative = 0.1

    def weigh(self, answered: Answered) -> FloatArray:
        """Return lambda of the clients that replied and hold a sample, renormalised; uniform before the first round."""
        weights = present = (answered.sizes > 0).astype(np.float64)
        if WEIGHTS in answered.state:
            weights = present * answered.state[WEIGHTS].numpy()[answered.ids]
        return as_shares(weights if weights.sum() > 0 else present, "sizes")

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return the first lambda, uniform over all clients."""
        import torch

        return {WEIGHTS: torch.full((clients,), 1 / clients, dtype=torch.float64)}

    def end_local(self, end: LocalEnd) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the client's loss at the model that was sent."""
        return {}, {LOSS: end.full_loss(end.start)}

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the next lambda."""
        import torch

        losses = np.zeros(end.clients)
        losses[end.ids] = [float(reply[LOSS]) for reply in end.replies]
        return {WEIGHTS: torch.from_numpy(afl_update(state[WEIGHTS].numpy(), losses, self.step_size))}


def _vector(name: str, values: ArrayLike) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ArgumentError(f"{name}: expected a finite number for each client, got shape {array.shape}")
    return array
