"""FedAdagrad, FedAdam and FedYogi: a server step of its own length for each parameter.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, algorithm 2. With D = sum_k a_k D_k:

    m <- b1 m + (1 - b1) D
    v <- v + D^2                                        FedAdagrad (b1 = 0)
    v <- b2 v + (1 - b2) D^2                            FedAdam
    v <- v - (1 - b2) D^2 sign(v - D^2)                 FedYogi
    w <- w + lr m / (sqrt(v) + tau)

m begins at 0 and v at tau^2, which is `initial` where it is given. Flower, fluke and FL-bench all begin v at 0
(`initial = 0`). Flower's FedAdam alone multiplies lr by sqrt(1 - b2^(t+1)) / (1 - b1^(t+1)) in round t, from 1, after
Adam (`corrected = true`); the paper has no such factor. With these two, and with Flower's lr and no batch norm, the
steps are Flower's.

Where v is near 0 and tau small, a parameter moves by about lr whatever the length of D: lr and tau are to be searched
(the paper's grids: lr 0.001 to 10, tau 0.00001 to 0.1). Buffers such as batch-norm statistics are averaged as ever;
Flower steps along them too, which can make a variance negative.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedskew.parameters import BelowOne, Between, NonNegative, Positive, Switch, component
from fedskew.server_updates._protocol import Extras, Named


@component
class _Adaptive:
    """Shared by the three: all but how v grows."""

    paper: ClassVar[str] = "Reddi et al., ICLR 2021"

    lr: Positive = 0.01
    momentum: BelowOne = 0.9
    tau: Positive = 1e-3
    initial: NonNegative | None = None

    def init(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return m = 0 (empty where `momentum` is 0), the first v, and how often the model has moved, 0-d."""
        first = self.tau**2 if self.initial is None else self.initial
        return {
            "mean": torch.zeros_like(parameters) if self.momentum else parameters.new_zeros(0),
            "square": torch.full_like(parameters, first),
            "moves": torch.tensor(0),
        }

    def move(self, state: Named, parameters: Tensor, change: Tensor, extras: Extras) -> tuple[Tensor, Named]:
        """See `ServerUpdate.move`."""
        square = self._grown(state["square"].double(), change.square())
        mean, kept = change, state["mean"]
        if self.momentum:
            mean = self.momentum * state["mean"].double() + (1 - self.momentum) * change
            kept = mean.to(parameters.dtype)
        moves = state["moves"] + 1
        moved = parameters + self._rate(int(moves)) * mean / (square.sqrt() + self.tau)
        return moved.to(parameters.dtype), {"mean": kept, "square": square.to(parameters.dtype), "moves": moves}

    def _grown(self, square: Tensor, new: Tensor) -> Tensor:
        """Return the next v, from the last one and D^2."""
        raise NotImplementedError

    def _rate(self, moves: int) -> float:
        return self.lr


@component
class FedAdagrad(_Adaptive):
    """Divide each parameter's step by the root of all its squared updates so far.

    Attributes:
        lr: Learning rate of the server; 0.1 in the paper for CIFAR-10, and in Flower.
        momentum: The paper's b1.
        tau: Keeps steps short where updates are short.
        initial: What v begins at; tau^2 where None, 0 in Flower.
    """

    lr: Positive = 0.1
    momentum: BelowOne = 0.0

    def _grown(self, square: Tensor, new: Tensor) -> Tensor:
        return square + new


@component
class FedAdam(_Adaptive):
    """Divide each parameter's step by the root of a running mean of its squared updates.

    Attributes:
        lr: Learning rate of the server; 0.01 in the paper for CIFAR-10, 0.1 in Flower.
        momentum: The paper's b1.
        tau: Keeps steps short where updates are short.
        initial: What v begins at; tau^2 where None, 0 in Flower.
        decay: The paper's b2.
        corrected: Correct the first rounds' steps as Flower does.
    """

    decay: Between = 0.99
    corrected: Switch = False

    def _grown(self, square: Tensor, new: Tensor) -> Tensor:
        return self.decay * square + (1 - self.decay) * new

    def _rate(self, moves: int) -> float:
        if not self.corrected:
            return self.lr
        return self.lr * math.sqrt(1 - self.decay ** (moves + 1)) / (1 - self.momentum ** (moves + 1))


@component
class FedYogi(_Adaptive):
    """Divide each parameter's step by the root of its squared updates, which v follows by steps of their size.

    Attributes:
        lr: Learning rate of the server; 0.01 in the paper for CIFAR-10, and in Flower.
        momentum: The paper's b1.
        tau: Keeps steps short where updates are short.
        initial: What v begins at; tau^2 where None, 0 in Flower.
        decay: The paper's b2.
    """

    decay: Between = 0.99

    def _grown(self, square: Tensor, new: Tensor) -> Tensor:
        return square - (1 - self.decay) * new * torch.sign(square - new)
