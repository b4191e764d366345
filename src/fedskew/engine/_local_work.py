"""A client's local training, whatever the backend: its data, batches, settings and the method's components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data import Augmentation, Inputs
from fedskew.engine._backend import Assignment, LocalTraining, Sent
from fedskew.errors import RunError
from fedskew.hooks import Hooks
from fedskew.local_steps import LocalStep, StepSettings
from fedskew.objectives import Objective
from fedskew.randomness import Purpose, generator


class ClientSamples(NamedTuple):
    """One client's samples: some rows of a data set that is on the training device and may hold other clients' too.

    Attributes:
        inputs: The data set's inputs, `(samples, ...)`.
        targets: Its class ids, `(samples,)`.
        rows: Which of its rows are this client's, `(own samples,)`.
        counts: How many of the client's samples are of each class, `(classes,)`.
    """

    inputs: Inputs
    targets: Tensor
    rows: NDArray[np.int64]
    counts: NDArray[np.float64]


class ClientData(Protocol):
    """Gives the samples of a client; called only for clients that take part in a round."""

    def of(self, client: int) -> ClientSamples:
        """The samples of one client.

        Args:
            client: The client's number.
        """


@dataclass(frozen=True)
class PartitionedData:
    """One data set in memory, partitioned among clients.

    Attributes:
        inputs: Inputs of all samples, `(samples, ...)`.
        targets: Class ids, `(samples,)`.
        rows: The rows of each client.
        counts: Label counts, `(clients, classes)`.
    """

    inputs: Inputs
    targets: Tensor
    rows: Sequence[NDArray[np.int64]]
    counts: NDArray[np.float64]

    def of(self, client: int) -> ClientSamples:
        """See `ClientData.of`."""
        return ClientSamples(self.inputs, self.targets, self.rows[client], self.counts[client])


@dataclass(frozen=True)
class LocalWork:
    """Local training as a method defines it.

    Shuffles, quotas, dropout and augmentation depend on (`seed`, round, client) only.

    Attributes:
        data: Where clients' samples come from.
        objective: What a client minimises.
        local_step: How it moves along the gradient.
        training: Batch size, learning rate and the like.
        seed: Seed of all random draws.
        augment: Random changes of a batch's inputs; None: none.
        hooks: The method's components that have hooks, by name.
    """

    data: ClientData
    objective: Objective
    local_step: LocalStep
    training: LocalTraining
    seed: int
    augment: Augmentation | None = None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)

    def settings(self, round: int, sent: Sent, state: Mapping[str, Tensor]) -> StepSettings:
        """What stays the same during a client's local training.

        Args:
            round: Number of the round, from 1.
            sent: What the server sent.
            state: What the client kept from its last participation.

        Returns:
            The settings of every local step.
        """
        return StepSettings(
            start=sent.model.parameters,
            lr=self.training.lr * self.training.lr_decay ** (round - 1),
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            broadcast=sent.broadcast,
            client=state,
        )

    def samples(self, round: int, task: Assignment) -> ClientSamples:
        """What a client trains on in a round.

        Args:
            round: Number of the round, from 1.
            task: The client's assignment.

        Returns:
            All of its samples, or as many of each class as its quota says, drawn at random.
        """
        samples = self.data.of(task.client)
        if task.quota is None:
            return samples
        rows = samples.rows
        labels = samples.targets[torch.from_numpy(rows).to(samples.targets.device)].cpu().numpy()
        rng = generator(self.seed, Purpose.QUOTA, round, task.client)
        drawn = [rng.permutation(rows[labels == label])[: int(share)] for label, share in enumerate(task.quota)]
        return samples._replace(rows=np.concatenate(drawn), counts=task.quota)

    def expected_samples(self, task: Assignment) -> int:
        """How many samples a client passes through the model as far as the server knows; its time is proportional.

        Args:
            task: The client's assignment.
        """
        seen = task.epochs * task.samples
        return seen if task.steps is None else min(seen, task.steps * self.training.batch_size)

    def epoch_orders(
        self, round: int, client: int, rows: NDArray[np.int64], epochs: int
    ) -> Iterator[NDArray[np.int64]]:
        """A client's rows in a new random order for every epoch.

        Args:
            round: Number of the round, from 1.
            client: The client's number.
            rows: Its rows, `(own samples,)`.
            epochs: Number of epochs.

        Yields:
            As many of the rows as `LocalTraining.samples_of_epoch` says.
        """
        rng = generator(self.seed, Purpose.SHUFFLE, round, client)
        for _ in range(epochs):
            yield rows[rng.permutation(len(rows))][: self.training.samples_of_epoch(len(rows))]


def training_failed(where: str, error: Exception) -> RunError:
    """The error to raise for one inside a local step, in one line."""
    said = " ".join(str(error).split())
    if "more than 1 value per channel" in said:
        said += "; training.smallest_batch = 2 leaves out a last batch of one sample, which batch norm cannot train on"
    return RunError(f"{where}: local training failed: {said}")
