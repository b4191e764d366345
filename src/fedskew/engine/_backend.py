"""What the round asks of a backend: train this cohort from this model, and return the updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew.models import ModelState


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: shared by all clients, whatever the method.

    The learning rate of round r (from 1) is `lr * lr_decay ** (r - 1)`. Two habits of public code, off by default:
    `persist_momentum` keeps each client's momentum buffer between its participations (FedVLS's code does for its
    baselines), and `teacher_train_mode` leaves the teacher's batch norm on batch statistics (FedVLS's code for itself).
    A last batch of an epoch with fewer samples than `smallest_batch` is left out (1: none; from `batch_size` on: all).
    """

    batch_size: int = 64
    lr: float = 0.01
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    persist_momentum: bool = False
    teacher_train_mode: bool = False
    smallest_batch: int = 1

    def samples_of_epoch(self, samples: int) -> int:
        """How many of a client's samples pass through the model in each epoch."""
        last = samples % self.batch_size
        return samples - last if last < self.smallest_batch else samples


class Assignment(NamedTuple):
    """What one client is asked to do in a round.

    `state`: what it kept from its last participation (see `fedskew.hooks`); `quota`, `(classes,)`: it trains on so many
    of its samples of each class, drawn for this round; None: on all of them. `steps`: it takes so many local steps at
    the most; None: all of its epochs. `samples`: how many it trains on as far as the server knows, by which backends
    deal out work.
    """

    client: int
    epochs: int
    state: Mapping[str, Tensor] = {}
    quota: NDArray[np.float64] | None = None
    steps: int | None = None
    samples: int = 0


class Sent(NamedTuple):
    """What the server sends to every client of the cohort: the model, and what components broadcast beside it."""

    model: ModelState
    broadcast: Mapping[str, Tensor] = {}


class Update(NamedTuple):
    """What comes back from one client.

    `change`: its parameters minus those that were sent, `(parameters,)`; `norm`: the Euclidean norm of that, 0-d, taken
    where the change was made and still is in the cache; `buffers` and `integers`: its own; `loss`: mean objective over
    its local training; `reply`: what components return beside the update; `state`: what the client keeps, which does
    not
    travel; `observed`: what the simulation's observer made of its model, if there is one.
    """

    client: int
    change: Tensor
    norm: Tensor
    buffers: Tensor
    integers: Tensor
    steps: int
    loss: float
    reply: Mapping[str, Tensor] = {}
    state: Mapping[str, Tensor] = {}
    observed: Any = None


Observer = Callable[[int, int, nn.Module], Any]
"""Called with the round, a client and its model right after its local training; it returns what is to be kept of it,
plain values or None, as `Update.observed`. It is pickled where clients train in other processes."""


class Backend(Protocol):
    """Where a cohort trains. It may hold processes or memory from `open`, or its first round, to `close`."""

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Each client of `cohort` trained from what was sent; updates in the order of `cohort`."""

    def open(self) -> None:
        """Get ready; called once before the first round, so that starting may overlap with other work."""
        return

    def close(self) -> None:
        """Let go of everything; `open` or `train` may follow."""
        return
