"""The interface between a round and the backend that trains its cohort."""

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
    """Settings of local training that all clients share, whatever the method.

    Attributes:
        batch_size: Samples in a batch.
        lr: Learning rate of the first round; in round r (from 1) it is `lr * lr_decay ** (r - 1)`.
        lr_decay: Factor of the learning rate from round to round.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty, added to the gradient.
        persist_momentum: Each client keeps its momentum buffer between participations, as FedVLS's public code does for
            its baselines.
        teacher_train_mode: The teacher's batch norm uses batch statistics, as FedVLS's public code does for itself.
        smallest_batch: A last batch of an epoch with fewer samples is left out (1: none; from `batch_size` on: every
            short one).
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
        """How many samples a client trains on in an epoch.

        Args:
            samples: How many the client has.

        Returns:
            The same number, without a last batch that is too small.
        """
        last = samples % self.batch_size
        return samples - last if last < self.smallest_batch else samples


class Assignment(NamedTuple):
    """What one client has to do in a round.

    Attributes:
        client: The client's number.
        epochs: Local epochs.
        state: What the client kept from its last participation (see `fedskew.hooks`).
        quota: Samples of each class to train on, `(classes,)`, drawn anew for this round; None: all samples.
        steps: Upper limit on local steps; None: all of its epochs.
        samples: How many samples it trains on as far as the server knows; backends balance their load by it.
    """

    client: int
    epochs: int
    state: Mapping[str, Tensor] = {}
    quota: NDArray[np.float64] | None = None
    steps: int | None = None
    samples: int = 0


class Sent(NamedTuple):
    """What the server sends to every client of the cohort.

    Attributes:
        model: The global model.
        broadcast: What components send beside it, by name.
    """

    model: ModelState
    broadcast: Mapping[str, Tensor] = {}


class Update(NamedTuple):
    """What comes back from one client.

    Attributes:
        client: The client's number.
        change: Its parameters minus those that were sent, `(parameters,)`.
        norm: Euclidean norm of `change`, 0-d, computed where the change was made and still is in the cache.
        buffers: Its floating-point buffers, such as batch norm's running statistics.
        integers: Its integer buffers.
        steps: Local steps taken.
        loss: Mean objective over its local training.
        reply: What components return beside the update, by name.
        state: What the client keeps until its next participation; it is not sent to the server.
        observed: What the `Observer` returned for its model; None without one.
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
"""Called with the round, a client and its model right after its local training; what it returns, plain values or None,
becomes `Update.observed`. It is pickled where clients train in other processes."""


class Backend(Protocol):
    """Trains a cohort. It may hold processes or memory from `open`, or its first round, to `close`."""

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train every client of a cohort, each from what the server sent.

        Args:
            round: Number of the round, from 1.
            cohort: The assignment of each client.
            sent: The global model and what is broadcast beside it.

        Returns:
            One update for each client, in the order of `cohort`.

        Raises:
            RunError: A client's training failed; the message names the round and the client.
        """

    def open(self) -> None:
        """Prepare for the first round, so that starting may overlap with other work."""
        return

    def close(self) -> None:
        """Release all resources; `open` or `train` may follow."""
        return
