"""FedExP: a server step that grows with the disagreement of the clients.

Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

    eta = max(1, sum_k p_k ||D_k||^2 / (2 (||sum_k p_k D_k||^2 + eps)))
    w   <- w + eta sum_k p_k D_k

p are the weighting slot's weights; the paper has 1 / M. The authors' code multiplies eps by the number of clients and
lets it decay with the learning rate; here eps is constant. The authors report the average of the last two models, which
is `average_last_two`; without it the last model counts. Buffers such as batch-norm statistics are not extrapolated
(some public code does).
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedskew.errors import ArgumentError
from fedskew.hooks import Hooks, Named, RoundEnd
from fedskew.parameters import NonNegative, component
from fedskew.server_updates._protocol import FloatArray, as_tensor, as_weights, weighted_sum


def fedexp_step(updates: ArrayLike | Tensor, weights: ArrayLike, eps: float) -> float:
    """FedExP's server step eta.

    Args:
        updates: Client model minus sent model, shape `(clients, parameters)`, numpy or torch.
        weights: Weights, shape `(clients,)`, sum 1.
        eps: Keeps the step small where updates cancel.

    Returns:
        The step, 1 or more; 1 where no client moved.

    Raises:
        ArgumentError: Wrong shapes, weights or eps, or an array of updates that is not finite.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise ArgumentError(f"eps: must be 0 or above and finite, got {eps}")
    rows, shares = as_tensor(updates), as_weights(weights)
    return _step(rows, shares, weighted_sum(rows, shares), eps)


LAST = "fedexp.last"


@component
class FedEXP(Hooks):
    """Move the model by FedExP's extrapolated update.

    Attributes:
        eps: 0.001 in the authors' code for CIFAR-10, CIFAR-100 and CINIC-10, 0.1 for EMNIST, and 0.01 in the FedVLS
            paper.
        average_last_two: Evaluate and save the mean of the last two models' parameters, with the last one's buffers;
            training goes on from the last.
    """

    paper: ClassVar[str] = "Jhunjhunwala et al., ICLR 2023"
    reads_each_update: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    eps: NonNegative = 1e-3
    average_last_two: bool = False

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
        """Compute the next model; arguments as in `ServerUpdate`. `steps` is not used."""
        mean = weighted_sum(updates, weights)
        return (parameters + _step(updates, weights, mean, self.eps) * mean).to(parameters.dtype), None

    def share(self, update: Tensor, steps: int) -> tuple[float, float]:
        """Return 1, and the update's squared norm; see `SummedUpdate`."""
        return 1.0, _squared_norm(update)

    def update_from_sums(self, state: None, parameters: Tensor, change: Tensor, number: float) -> tuple[Tensor, None]:
        """Compute the next model from the mean update and the mean squared norm; see `SummedUpdate`."""
        return (parameters + _extrapolation(number, change, self.eps) * change).to(parameters.dtype), None

    def init_server(self, parameters: Tensor, clients: int) -> dict[str, Tensor]:
        """Return the model itself, where the last two are averaged."""
        return {LAST: parameters} if self.average_last_two else {}

    def end_round(self, state: Named, end: RoundEnd) -> dict[str, Tensor]:
        """Return the model that was sent, where the last two are averaged."""
        return {LAST: end.old} if self.average_last_two else {}

    def evaluated(self, state: Named, parameters: Tensor) -> Tensor:
        """Return the model to evaluate: the mean of the last two, or the last."""
        return (parameters + state[LAST]) / 2 if self.average_last_two else parameters


def _step(updates: Tensor, weights: FloatArray, mean: Tensor, eps: float) -> float:
    spread = sum(weight * _squared_norm(update) for update, weight in zip(updates, weights.tolist(), strict=True))
    return _extrapolation(spread, mean, eps)


def _extrapolation(spread: float, mean: Tensor, eps: float) -> float:
    denominator = 2 * (_squared_norm(mean) + eps)
    return max(1.0, spread / denominator) if denominator > 0 else 1.0


def _squared_norm(vector: Tensor) -> float:
    """Return the squared norm, folded in halves to a length that PyTorch sums in one thread: always the same bits."""
    squares = vector.to(torch.float64).square()
    while len(squares) > 4096:
        half = (len(squares) + 1) // 2
        squares[: len(squares) - half] += squares[half:]
        squares = squares[:half]
    return float(squares.sum())
