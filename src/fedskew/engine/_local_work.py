"""What a client does in a round, whatever the backend: its data, its batches, its settings, and its method's parts."""

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
    """One client's samples.

    They are the `rows`, `(own samples,)`, of `inputs`, `(samples, ...)`, and `targets`, `(samples,)`, which are on the
    device that trains and may hold other clients' samples too; `counts`, `(classes,)`: how many of each class.
    """

    inputs: Inputs
    targets: Tensor
    rows: NDArray[np.int64]
    counts: NDArray[np.float64]


class ClientData(Protocol):
    """Where clients' samples come from; asked for only when a client takes part."""

    def of(self, client: int) -> ClientSamples:
        """The samples of one client."""


@dataclass(frozen=True)
class PartitionedData:
    """One data set, held once, of which client k has the rows `rows[k]` with label counts `counts[k]`."""

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

    Shuffles, quotas, dropout and augmentation depend on (`seed`, round, client) only. `hooks`: the method's components
    that have any, by name.
    """

    data: ClientData
    objective: Objective
    local_step: LocalStep
    training: LocalTraining
    seed: int
    augment: Augmentation | None = None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)

    def settings(self, round: int, sent: Sent, kept: Mapping[str, Tensor]) -> StepSettings:
        """What stays the same during a client's local training; `kept`: what the client kept."""
        return StepSettings(
            start=sent.model.parameters,
            lr=self.training.lr * self.training.lr_decay ** (round - 1),
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            broadcast=sent.broadcast,
            client=kept,
        )

    def samples(self, round: int, task: Assignment) -> ClientSamples:
        """What a client trains on in a round: all that it has, or as many of each class, drawn, as its quota says."""
        samples = self.data.of(task.client)
        if task.quota is None:
            return samples
        rows = samples.rows
        labels = samples.targets[torch.from_numpy(rows).to(samples.targets.device)].cpu().numpy()
        rng = generator(self.seed, Purpose.QUOTA, round, task.client)
        drawn = [rng.permutation(rows[labels == label])[: int(share)] for label, share in enumerate(task.quota)]
        return samples._replace(rows=np.concatenate(drawn), counts=task.quota)

    def expected_samples(self, task: Assignment) -> int:
        """How many samples a client passes through the model, as far as the server knows: what its time grows with."""
        seen = task.epochs * task.samples
        return seen if task.steps is None else min(seen, task.steps * self.training.batch_size)

    def epoch_orders(
        self, round: int, client: int, rows: NDArray[np.int64], epochs: int
    ) -> Iterator[NDArray[np.int64]]:
        """The client's rows in a fresh order for every epoch, as many as `LocalTraining.samples_of_epoch` says."""
        rng = generator(self.seed, Purpose.SHUFFLE, round, client)
        for _ in range(epochs):
            yield rows[rng.permutation(len(rows))][: self.training.samples_of_epoch(len(rows))]


def training_failed(where: str, error: Exception) -> RunError:
    """The one line for an error inside a local step."""
    said = " ".join(str(error).split())
    if "more than 1 value per channel" in said:
        said += "; training.smallest_batch = 2 leaves out a last batch of one sample, which batch norm cannot train on"
    return RunError(f"{where}: local training failed: {said}")
