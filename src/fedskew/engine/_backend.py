"""What clients do in a round, the same on every backend, and the interface of a backend that trains a cohort."""

import ctypes
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew import findings
from fedskew.data import Augmentation, Inputs
from fedskew.engine._records import Predictions
from fedskew.engine._training import LocalTraining
from fedskew.errors import ArgumentError, ComponentError, FedskewError, RunError, place_of
from fedskew.hooks import Hooks
from fedskew.local_steps import LocalStep
from fedskew.models import FlatModel, ModelState
from fedskew.objectives import Objective
from fedskew.randomness import Purpose, generator

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h

PARAMETERS, BUFFERS = "private.parameters", "private.buffers"
"""Names of what a client kept, in its state."""


@dataclass(frozen=True)
class Conditions:
    """Clients that drop out of a round, and clients that do less work, as in FedEntOpt's table III.

    Attributes:
        dropout: Share of each cohort that drops out after selection (0.3 in the table).
        dropout_rule: "exact": floor(dropout * cohort) clients at random, but never the whole cohort; "bernoulli": each
            client independently with probability `dropout`, so that a round may have no participants.
        stragglers: Share of the clients (0.5 in the table) that do 1 to `epochs` local epochs; the stragglers and their
            epochs are drawn once for all rounds.
    """

    dropout: float = 0.0
    dropout_rule: Literal["exact", "bernoulli"] = "exact"
    stragglers: float = 0.0

    def dropped(self, cohort: int, seed: int, round: int) -> NDArray[np.bool_]:
        """Draw which clients of a cohort drop out: a mask, `(cohort,)`."""
        rng = generator(seed, Purpose.DROPOUT, round)
        if self.dropout_rule == "bernoulli":
            return rng.random(cohort) < self.dropout
        dropped = np.zeros(cohort, dtype=np.bool_)
        dropped[rng.permutation(cohort)[: min(math.floor(self.dropout * cohort + 1e-9), cohort - 1)]] = True
        return dropped

    def epochs(self, clients: int, epochs: float, seed: int) -> NDArray[np.int64] | NDArray[np.float64]:
        """Draw the local epochs of every client, of which only stragglers' are fewer; the same in every round."""
        each = np.full(clients, epochs)
        slow = math.floor(self.stragglers * clients + 1e-9)
        if slow:
            rng = generator(seed, Purpose.STRAGGLERS)
            each[rng.permutation(clients)[:slow]] = rng.integers(1, max(math.floor(epochs), 1), slow, endpoint=True)
        return each


class Assignment(NamedTuple):
    """The work of one client in a round.

    Attributes:
        epochs: Local epochs; of the last one, a fraction may be trained.
        state: The state that the client kept from its last participation (see `fedskew.hooks`).
        quota: Number of samples of each class to train on, `(classes,)`; drawn anew in this round. None: all samples.
        steps: Upper limit on local steps; None: no limit.
        samples: Number of samples that the server expects the client to train on; backends balance their load by it.
    """

    client: int
    epochs: float
    state: Mapping[str, Tensor] = {}
    quota: NDArray[np.float64] | None = None
    steps: int | None = None
    samples: int = 0


class Sent(NamedTuple):
    """The model, and the tensors that components broadcast beside it, by name."""

    model: ModelState
    broadcast: Mapping[str, Tensor] = {}


class Update(NamedTuple):
    """The result of one client's local training.

    Attributes:
        change: The client's parameters minus those that were sent, `(parameters,)`.
        norm: Euclidean norm of `change`, 0-d; computed right after `change`, while that is in the processor's cache.
        buffers: The client's floating-point buffers, such as batch norm's running statistics.
        loss: Mean objective over the local training.
        reply: Tensors that components return beside the update, by name.
        state: The state that the client keeps until its next participation; it is not sent to the server.
        observed: What the `Observer` returned for its model; None without one.
        logged: Figures that components logged at the client, by name; real sites don't send them.
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
    logged: Mapping[str, float] = {}


def cohort_size(participation: float, clients: int) -> int:
    """Return how many clients are selected in a round: `max(1, floor(participation * clients + 1e-9))`."""
    return max(1, math.floor(participation * clients + 1e-9))


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes that named tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def reuse_freed_memory(reuse: bool) -> None:
    """Let this process keep the memory that it frees, or return it to the system, where the C library is glibc: it
    fetches large tensors afresh each time, and a fresh page takes longer than what is computed in it."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_MMAP_MAX, 0 if reuse else 65536)
    libc.mallopt(_TRIM_THRESHOLD, -1 if reuse else 131072)
    if not reuse:
        libc.malloc_trim(0)


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Let this thread, and those that it starts, compute with 0 in place of numbers below 1e-38 inside the block, or
    decorated function, unless PyTorch computes with several threads, as the others would not.

    A client of one class soon has gradients of such numbers, and each operation with one takes an Intel processor a
    hundred cycles.
    """
    flushes = torch.get_num_threads() == 1 and bool(torch.full((), 1e-38, dtype=torch.float32) * 0.1 > 0)
    if flushes:
        torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(False)


Observer = Callable[[int, int, nn.Module], Any]
"""A function that is called with the round, a client and the client's model right after its local training. It returns
plain values or None, which become `Update.observed`. It is pickled if clients train in other processes."""


class Backend(Protocol):
    """Trains cohorts.

    A backend may hold processes or memory from `open`, or from its first round, until `close`.
    """

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """Train every client of a cohort, each from what the server sent; return their updates in the cohort's order.

        Raises:
            RunError: A client's training failed; the message names the round and the client.
        """

    def predict(self, model: ModelState, inputs: Inputs, targets: Tensor, num_classes: int) -> Predictions | None:
        """Predict a data set with a model in the backend's processes, as `engine.predict` does; None: it has none."""
        return None

    train_each: Callable[[int, Sequence[Assignment], Sent], Iterator[Update]] | None = None
    """Where a backend has it: train clients as `train` does, and yield their updates in the cohort's order.

    What an update's `change` holds may be overwritten once the next is asked for.
    """

    ask_losses: Callable[[int, Sequence[Assignment], Sent], list[float]] | None = None
    """Where a backend has it: return the mean objective of what is sent over all samples of each client of a cohort."""

    def find_fault(self, round: int, task: Assignment, sent: Sent) -> ComponentError | None:
        """Train a client again whose update was not finite; return the error that names what is to blame, or None."""
        return None

    def open(self) -> None:
        """Prepare for the first round, for example by starting processes; the caller can do other work meanwhile."""
        return

    def close(self) -> None:
        """Release all resources. The backend can be used again: `open` or `train` acquires them anew."""
        return


class ClientSamples(NamedTuple):
    """One client's `rows` of a data set on the training device, its label counts, `(classes,)`, and whether targets are
    the bits of `several` labels."""

    inputs: Inputs
    targets: Tensor
    rows: NDArray[np.int64]
    counts: NDArray[np.float64]
    several: bool = False


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
    several: bool = False

    def of(self, client: int) -> ClientSamples:
        """Return the samples of one client."""
        return ClientSamples(self.inputs, self.targets, self.rows[client], self.counts[client], self.several)


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
    components that have hooks, by name; `private` is what of the model never leaves a client.
    """

    data: ClientData
    objective: Objective
    local_step: LocalStep
    training: LocalTraining
    seed: int
    augment: Augmentation | None = None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)
    private: "Private | None" = None

    @cached_property
    def kind(self) -> bytes | None:
        """The same for work on a data set that differs in no more than samples, seed and learning rate: a pickle, so
        that no parameter of a component is left out; None where there is none."""
        training = {name: value for name, value in vars(self.training).items() if name not in ("lr", "lr_decay")}
        try:
            return pickle.dumps((self.objective, self.local_step, training, self.hooks, self.private))
        except Exception:  # such as a class that stands in a function
            return None

    @property
    def components(self) -> list[Any]:
        """The components that train a client."""
        return [self.local_step, *self.objective.losses, *self.hooks.values()]

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
        return Schedule(self.training.steps(task.epochs, samples, task.steps), self.training.batches_of_epoch(samples))

    def repeats(self, samples: ClientSamples, schedule: Schedule) -> bool:
        """Return whether steps go on beyond a first epoch that has all samples, and see them unchanged in each."""
        training, rows = self.training, len(samples.rows)
        whole = training.sampler is None and training.samples_of_epoch(rows) == rows
        return whole and self.augment is None and not training.teacher_train_mode and schedule.epochs > 1

    def epoch_orders(
        self, round: int, client: int, samples: ClientSamples, rows: NDArray[np.int64], epochs: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield `rows`, which stand for the client's, drawn anew for every epoch and cut to `samples_of_epoch`."""
        rng = generator(self.seed, Purpose.SHUFFLE, round, client)
        sampled = self.training.sampler is not None
        if sampled:
            labels = samples.targets[torch.from_numpy(samples.rows).to(samples.targets.device)].cpu().numpy()
            if samples.several:
                labels = findings.rarest(findings.as_table(labels, len(samples.counts)))
        for _ in range(epochs):
            order = self.training.drawn(labels, samples.counts, rng) if sampled else rng.permutation(len(rows))
            yield rows[order][: self.training.samples_of_epoch(len(rows))]


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
    if "does not require grad" in said:
        said += "; the loss depends on no parameter: detach(), item() and torch.tensor() cut it off from the network"
    return RunError(f"{where}: local training failed: {said}")


def require_gradient(component: Any, objective: Any) -> None:
    """Raise ComponentError where a local step asked for no gradient, with which the training loss is computed, too."""
    if not objective.is_evaluated:
        called = f"{type(component).__name__}.step() never called gradient(parameters)"
        raise ComponentError(f"{called}; call it once at least, as it computes the loss too")


class Private(NamedTuple):
    """What never leaves a client: masks of the model's parameters and of its floating-point buffers, 1-d, bool.

    `first_epochs`: so many epochs train these parameters alone (see `personal.Alternating`).
    """

    parameters: Tensor
    buffers: Tensor
    first_epochs: int = 0

    @staticmethod
    def of(model: FlatModel, names: frozenset[str], first_epochs: int = 0) -> "Private":
        """Mark the parameters and buffers of these names."""
        state = model.read_state()
        parameters, buffers = torch.zeros_like(state.parameters), torch.zeros_like(state.buffers)
        for name, part in (model.views(parameters) | model.buffer_views(buffers, state.integers)).items():
            if name in names:
                part.fill_(1)
        return Private(parameters.bool(), buffers.bool(), first_epochs)

    @property
    def bytes(self) -> int:
        """Bytes of what does not travel."""
        return 4 * int(self.parameters.sum() + self.buffers.sum())

    def start(self, sent: ModelState, state: Mapping[str, Tensor]) -> ModelState:
        """Return the model that a client begins with: the one that was sent, with what the client kept."""
        if PARAMETERS not in state:
            return sent
        parameters, buffers = sent.parameters.clone(), sent.buffers.clone()
        parameters[self.parameters] = state[PARAMETERS].to(parameters.device)
        buffers[self.buffers] = state[BUFFERS].to(buffers.device)
        return sent._replace(parameters=parameters, buffers=buffers)

    def shared(self, model: ModelState, sent: ModelState) -> ModelState:
        """Return a client's model as others may see it: with what is private as it was sent."""
        parameters = torch.where(self.parameters, sent.parameters, model.parameters)
        return model._replace(parameters=parameters, buffers=torch.where(self.buffers, sent.buffers, model.buffers))

    def kept(self, model: ModelState) -> dict[str, Tensor]:
        """Return what a client keeps of its model, for its state."""
        return {PARAMETERS: model.parameters[self.parameters], BUFFERS: model.buffers[self.buffers]}

    def steps(self, of_epoch: int) -> dict[str, Tensor]:
        """Return what a step that trains some layers first reads of the client's state."""
        if not self.first_epochs:
            return {}
        first = torch.full((), float(of_epoch * self.first_epochs), device=self.parameters.device)
        return {"private.first": first, "private.mask": self.parameters}
