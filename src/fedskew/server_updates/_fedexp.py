"""FedExP: a server step that grows with the disagreement of the clients.

Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

    eta = max(1, sum_k p_k ||D_k||^2 / (2 (||sum_k p_k D_k||^2 + eps)))
    w   <- w + eta sum_k p_k D_k

p are the weighting slot's weights; the paper has 1 / M. The authors' code multiplies eps by the number of clients and
lets it decay with the learning rate; here eps is constant. The authors report the average of the last two models, which
is `average_last_two`; without it the last model counts. Buffers such as batch-norm statistics are not extrapolated
(some public code does).
"""

from typing import ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedskew.hooks import Hooks
from fedskew.labels import as_amounts
from fedskew.parameters import NonNegative, checked, component
from fedskew.server_updates._protocol import Extras, Named, as_tensor, weighted_sum


@checked
def fedexp_step(updates: ArrayLike | Tensor, weights: ArrayLike, eps: NonNegative) -> float:
    """FedExP's server step eta, 1 or more; 1 where no client moved. `eps` keeps it small where updates cancel.

    `updates` are client models minus the sent one, `(clients, parameters)`, numpy or torch; `weights` sum to 1.
    """
    rows, shares = as_tensor(updates), as_amounts(weights, "weights", ("updates",))
    mean = weighted_sum(rows, shares)
    squares = sum(weight * _squared_norm(update) for update, weight in zip(rows, shares.tolist(), strict=True))
    return _extrapolation(squares, mean, eps)


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

    eps: NonNegative = 1e-3
    average_last_two: bool = False

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return the model itself, where the last two are averaged."""
        return {"last": parameters} if self.average_last_two else {}

    def share(self, update: Tensor, steps: int, weight: float) -> tuple[float, Extras]:
        """Return 1, and the update's weighted squared norm."""
        return 1.0, {"squares": weight * _squared_norm(update)}

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """See `ServerUpdate.move`."""
        step = _extrapolation(extras["squares"], change, self.eps)
        moved = (parameters + step * change).to(parameters.dtype)
        return moved, {"last": parameters} if self.average_last_two else {}

    def evaluated(self, state: Named, parameters: Tensor) -> Tensor:
        """Return the model to evaluate: the mean of the last two, or the last."""
        return (parameters + state["last"]) / 2 if self.average_last_two else parameters


def _extrapolation(squares: float, mean: Tensor, eps: float) -> float:
    denominator = 2 * (_squared_norm(mean) + eps)
    return max(1.0, squares / denominator) if denominator > 0 else 1.0


def _squared_norm(vector: Tensor) -> float:
    """Return the squared norm, folded in halves to a length that PyTorch sums in one thread: always the same bits."""
    squares = vector.to(torch.float64).square()
    while len(squares) > 4096:
        half = (len(squares) + 1) // 2
        squares[: len(squares) - half] += squares[half:]
        squares = squares[:half]
    return float(squares.sum())
