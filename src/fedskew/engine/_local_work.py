"""A client's local training, the same on every backend: its data, batches, settings and the method's components."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data import Augmentation, Inputs
from fedskew.engine._backend import Assignment, LocalTraining, Sent
from fedskew.errors import ArgumentError, ComponentError, FedskewError, RunError, place_of
from fedskew.hooks import Hooks
from fedskew.local_steps import LocalStep, StepSettings
from fedskew.objectives import Objective
from fedskew.randomness import Purpose, generator


class ClientSamples(NamedTuple):
    """One client's `rows` of a data set on the training device, and its label counts, `(classes,)`."""

    inputs: Inputs
    targets: Tensor
    rows: NDArray[np.int64]
    counts: NDArray[np.float64]


class ClientData(Protocol):
    """Gives the samples of each client; asked only for clients that take part in a round."""

    def of(self, client: int) -> ClientSamples:
        """Return the samples of one client."""


@dataclass(frozen=True)
class PartitionedData:
    """One data set in memory, each client's rows of it, and label counts, `(clients, classes)`."""

    inputs: Inputs
    targets: Tensor
    rows: Sequence[NDArray[np.int64]]
    counts: NDArray[np.float64]

    def of(self, client: int) -> ClientSamples:
        """Return the samples of one client."""
        return ClientSamples(self.inputs, self.targets, self.rows[client], self.counts[client])


class Schedule(NamedTuple):
    """How many local steps a client takes."""

    steps: int
    of_epoch: int

    @property
    def epochs(self) -> int:
        """The epochs that are begun."""
        return -(-self.steps // self.of_epoch) if self.steps else 0

    def in_last_epoch(self, step: int) -> bool:
        """Return whether a step, from 0, is one of the last, of which there are as many as a whole epoch has."""
        return step >= self.steps - self.of_epoch


@dataclass(frozen=True)
class LocalWork:
    """Local training as a method and a run's settings define it.

    Shuffles, quotas, dropout and augmentation depend only on (`seed`, round, client). `hooks` are the method's
    components that have hooks, by name.
    """

    data: ClientData
    objective: Objective
    local_step: LocalStep
    training: LocalTraining
    seed: int
    augment: Augmentation | None = None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)

    def trains_like(self, other: LocalWork) -> bool:
        """Return whether other work on the same data set is the same but for samples, seed and learning rate.

        Components are compared by `==`, and so are their parameters that it leaves out (`compare=False`); they are
        different where that can't tell.
        """
        training = replace(other.training, lr=self.training.lr, lr_decay=self.training.lr_decay)
        ours = (self.objective, self.local_step, self.training, self.hooks)
        theirs = (other.objective, other.local_step, training, other.hooks)
        try:
            return bool(ours == theirs) and bool(_left_out(ours) == _left_out(theirs))
        except (TypeError, ValueError, RuntimeError):  # a component that holds an array or a tensor
            return False

    def settings(self, round: int, sent: Sent, state: Mapping[str, Tensor]) -> StepSettings:
        """Make the settings that all local steps of a client share."""
        return StepSettings(
            start=sent.model.parameters,
            lr=self.training.lr_of(round),
            momentum=self.training.momentum,
            weight_decay=self.training.weight_decay,
            broadcast=sent.broadcast,
            client=state,
        )

    def samples(self, round: int, task: Assignment) -> ClientSamples:
        """Choose a client's samples in a round: all, or a quota of each class, drawn at random."""
        samples = self.data.of(task.client)
        if task.quota is None:
            return samples
        rows = samples.rows
        labels = samples.targets[torch.from_numpy(rows).to(samples.targets.device)].cpu().numpy()
        rng = generator(self.seed, Purpose.QUOTA, round, task.client)
        drawn = [rng.permutation(rows[labels == label])[: int(share)] for label, share in enumerate(task.quota)]
        return samples._replace(rows=np.concatenate(drawn), counts=task.quota)

    def expected_samples(self, task: Assignment) -> int:
        """Estimate, from the server's knowledge, how many samples a client passes through the model.

        Backends balance their load by it, since a client's training time is proportional to it.
        """
        seen = math.ceil(task.epochs * task.samples)
        return seen if task.steps is None else min(seen, task.steps * self.training.batch_size)

    def schedule(self, task: Assignment, samples: int) -> Schedule:
        """Count a client's local steps, at most the assignment's `steps`."""
        steps = self.training.steps(task.epochs, samples, task.steps)
        return Schedule(steps, self.training.batches_of_epoch(samples))

    def epoch_orders(
        self, round: int, client: int, rows: NDArray[np.int64], epochs: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield a client's rows shuffled anew for every epoch, cut to `LocalTraining.samples_of_epoch`."""
        rng = generator(self.seed, Purpose.SHUFFLE, round, client)
        for _ in range(epochs):
            yield rows[rng.permutation(len(rows))][: self.training.samples_of_epoch(len(rows))]


def training_failed(where: str, error: Exception) -> FedskewError:
    """Make a one-line error of an error that a local step has raised."""
    if isinstance(error, ComponentError):
        return ComponentError(f"{where}: {error}")
    if isinstance(error, FedskewError) and not isinstance(error, ArgumentError):
        return error
    said = " ".join(str(error).split())
    if not isinstance(error, RuntimeError | ValueError):
        said = f"{type(error).__name__}: {said}"
    if place := place_of(error):
        said += f" ({place})"
    if "more than 1 value per channel" in said:
        said += "; training.smallest_batch = 2 leaves out a last batch of one sample, which batch norm cannot train on"
    return RunError(f"{where}: local training failed: {said}")


def _left_out(value: Any) -> list[Any]:
    """Find the parameters that a component, or each of several, leaves out of `==`."""
    if isinstance(value, Mapping):
        return [_left_out(one) for one in value.values()]
    if isinstance(value, tuple | list):
        return [_left_out(one) for one in value]
    if not is_dataclass(value) or isinstance(value, type):
        return []
    kept = [(entry, getattr(value, entry.name)) for entry in fields(value) if entry.init]
    return [_left_out(one) if entry.compare else one for entry, one in kept]
