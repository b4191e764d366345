"""One client after another, on one model in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.engine._backend import Assignment, Backend, Observer, Sent, Update
from fedskew.engine._local_work import ClientSamples, LocalWork, training_failed
from fedskew.engine._update_buffer import UpdateBuffer
from fedskew.hooks import LocalEnd
from fedskew.local_steps import InPlace, StepSettings
from fedskew.models import Dropout, FlatModel, ModelState, Outputs, Product, with_features
from fedskew.objectives import Batch, Context
from fedskew.randomness import Purpose, fold, mix, stream_key

ROWS_AT_ONCE = 1000
MOMENTUM = "training.momentum"


class Started(NamedTuple):
    """A client before its first local step; `kept`: its state from its last participation, on the training device."""

    round: int
    task: Assignment
    sent: Sent
    kept: Mapping[str, Tensor]
    samples: ClientSamples
    settings: StepSettings
    context: Context


class Ended(NamedTuple):
    """A client after its last local step; `gathered`: what each component's hooks made of its batches, by name."""

    model: ModelState
    carried: Tensor | None
    steps: int
    loss: float
    gathered: Mapping[str, Mapping[str, Tensor]]


@dataclass
class SequentialBackend(Backend):
    """Trains a cohort client by client, on `model`, whose device also has the clients' data."""

    name: ClassVar[str] = "sequential"
    model: FlatModel
    work: LocalWork
    observe: Observer | None = None

    def __post_init__(self) -> None:
        self._network = with_features(self.model.module)
        self._dropouts = [layer for layer in self.model.module.modules() if isinstance(layer, Dropout)]
        reads = self.work.objective.reads
        batch_statistics = self.work.training.teacher_train_mode
        self._teacher = _Frozen(self.model, batch_statistics) if "teacher" in reads else None
        self._previous = _Frozen(self.model) if "previous" in reads else None
        self._rows = UpdateBuffer()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        on_cpu = sent.model.parameters.device.type == "cpu"
        rows = self._rows.acquire(len(cohort), sent.model.parameters.numel()) if on_cpu else None
        return self.train_into(rows, round, cohort, sent)

    def train_into(self, rows: Tensor | None, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """The same; changes are views of `rows`, `(cohort, parameters)`, or in memory of their own."""
        if self._teacher is not None:
            self._teacher.become(sent.model)
        updates = []
        for place, task in enumerate(cohort):
            started = self.begin(round, task, sent)
            updates.append(self.end(started, self._train(started), None if rows is None else rows[place]))
        return updates

    def train_client(self, round: int, task: Assignment, sent: Sent) -> tuple[Update, ModelState]:
        """Train one client, and return its update and its model after the last local step.

        The model is what the update's change is computed from, without the rounding of a subtraction. It may be a view
        of the backend's own model, and holds until that is used again.
        """
        if self._teacher is not None:
            self._teacher.become(sent.model)
        started = self.begin(round, task, sent)
        ended = self._train(started)
        return self.end(started, ended), ended.model

    def begin(self, round: int, task: Assignment, sent: Sent) -> Started:
        """A client before its first step."""
        start = sent.model.parameters
        kept = {name: value.to(start.device) for name, value in task.state.items()}  # those from files are on the CPU
        samples = self.work.samples(round, task)
        held = torch.as_tensor(samples.counts, dtype=start.dtype, device=start.device)
        settings = self.work.settings(round, sent, kept)
        return Started(round, task, sent, kept, samples, settings, Context(held, broadcast=sent.broadcast))

    def end(self, started: Started, ended: Ended, row: Tensor | None = None) -> Update:
        """What a client sends and keeps after its last step; its change is written to `row`, if there is one."""
        work, start = self.work, started.settings.start
        observed = None
        if self.observe is not None:
            self.model.write_state(ended.model)
            observed = self.observe(started.round, started.task.client, self.model.module)
        reply: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        if work.training.persist_momentum and ended.carried is not None:
            state[MOMENTUM] = ended.carried
        full = _Full(self, started)
        for name, hooks in work.hooks.items():
            own, returned = hooks.end_local(
                LocalEnd(
                    start=start,
                    parameters=ended.model.parameters,
                    buffers=ended.model.buffers,
                    steps=ended.steps,
                    lr=float(started.settings.lr),
                    momentum=started.settings.momentum,
                    client=started.kept,
                    broadcast=started.sent.broadcast,
                    gathered=ended.gathered[name],
                    full_gradient=full.gradient,
                    full_loss=full.loss,
                )
            )
            state |= own
            reply |= returned
        change = torch.sub(ended.model.parameters, start, out=row)
        return Update(
            client=started.task.client,
            change=change,
            norm=torch.linalg.vector_norm(change),
            buffers=ended.model.buffers,
            integers=ended.model.integers,
            steps=ended.steps,
            loss=ended.loss,
            reply=reply,
            state=state,
            observed=observed,
        )

    def _train(self, started: Started) -> Ended:
        work, settings = self.work, started.settings
        round, task, samples, client = started.round, started.task, started.samples, started.task.client
        self.model.write_state(started.sent.model)
        self._network.train()
        previous = self._previous_of(started)
        step, parameters = work.local_step, settings.start
        carried = started.kept[MOMENTUM].clone() if MOMENTUM in started.kept else step.init(settings)
        own = list(self.model.views(self.model.vector).values())
        carried_parts = [] if carried is None else list(self.model.views(carried).values())
        if isinstance(step, InPlace):
            parameters = self.model.vector
        dropout_key = stream_key(work.seed, Purpose.DROPOUT_LAYER, round, client)
        augmentation_key = stream_key(work.seed, Purpose.AUGMENTATION, round, client)
        gathered: dict[str, Mapping[str, Tensor]] = {name: {} for name in work.hooks}
        total, seen, steps = torch.zeros((), device=settings.start.device), 0, 0
        for epoch, batch in islice(self._batches(round, task, samples), task.steps):
            for layer in self._dropouts:
                layer.key.fill_(fold(dropout_key, steps))
            x, y = samples.inputs.index_select(0, batch), samples.targets.index_select(0, batch)
            if work.augment is not None:
                x = work.augment(x, mix(torch.arange(len(batch), device=x.device), augmentation_key, steps))
            passes = _Passes(self, x, y, started.context, previous)
            try:
                if isinstance(step, InPlace):
                    step.step_in_place(own, passes.gradients(), carried_parts, settings)
                else:
                    parameters, carried = step.step(parameters, passes.gradient, carried, settings)
            except (RuntimeError, ValueError) as error:
                where = f"round {round}, client {client}, step {steps} ({len(batch)} samples)"
                raise training_failed(where, error) from error
            for name, hooks in work.hooks.items():
                gathered[name] = hooks.gather(gathered[name], passes.batch, epoch == task.epochs - 1)
            total += passes.value * len(batch)
            seen += len(batch)
            steps += 1
        self.model.write(parameters)
        # Without hooks nothing writes to the model before `end` has read it, and copying a wide one takes milliseconds.
        state = self.model.read_state(copied=bool(work.hooks))
        return Ended(state, carried, steps, float(total) / seen if seen else 0.0, gathered)

    def _previous_of(self, started: Started) -> _Frozen | None:
        """The model that this client ended its last participation with; None at its first."""
        kept = started.kept
        if self._previous is None or "previous.parameters" not in kept:
            return None
        state = ModelState(kept["previous.parameters"], kept["previous.buffers"], started.sent.model.integers)
        self._previous.become(state)
        return self._previous

    def _batches(self, round: int, task: Assignment, samples: ClientSamples) -> Iterator[tuple[int, Tensor]]:
        """Rows of every batch of every epoch; the last short batch is kept."""
        if len(samples.rows) == 0:
            return
        for epoch, order in enumerate(self.work.epoch_orders(round, task.client, samples.rows, task.epochs)):
            for batch in torch.split(torch.from_numpy(order).to(samples.targets.device), self.work.training.batch_size):
                yield epoch, batch


class _Frozen:
    """A copy of the model that only looks: in eval mode (but for batch norm, if asked), without gradient."""

    def __init__(self, model: FlatModel, batch_statistics: bool = False) -> None:
        self._model = FlatModel(copy.deepcopy(model.module))
        self._network = with_features(self._model.module).eval()
        for layer in self._network.modules():
            if batch_statistics and isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()

    def become(self, state: ModelState) -> None:
        self._model.write_state(state)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Outputs:
        outputs: Outputs = self._network(x)
        return outputs


class _Passes:
    """Forward and backward passes over one batch, at any parameters.

    `value` and `batch` are of the first pass, at the parameters that the step began with.
    """

    value: Tensor
    _seen: Batch

    def __init__(
        self, backend: SequentialBackend, x: Tensor, y: Tensor, context: Context, previous: _Frozen | None
    ) -> None:
        self._backend, self._x, self._y = backend, x, y
        self._context = context._replace(
            teacher=backend._teacher(x) if backend._teacher is not None else None,
            previous=previous(x) if previous is not None else None,
        )
        self._first = True

    def gradient(self, parameters: Tensor) -> Tensor:
        """The objective's gradient, `(parameters,)`: the model's own vector, which holds until the next call."""
        model = self._backend.model
        model.write(parameters)
        value, batch = self.forward()
        model.differentiate(value)
        if self._first:
            self.value, self._seen, self._first = value.detach(), batch, False
        return model.gradient

    def gradients(self) -> list[Tensor | Product]:
        """The objective's gradient at the model's own parameters, in parts; see `FlatModel.gradients`."""

        def forward() -> Tensor:
            value, batch = self.forward()
            self.value, self._seen, self._first = value.detach(), batch, False
            return value

        return self._backend.model.gradients(forward)

    @property
    def batch(self) -> Batch:
        """The batch as the network saw it, without gradient."""
        return Batch(self._seen.features.detach(), self._seen.logits.detach(), self._seen.targets)

    def forward(self) -> tuple[Tensor, Batch]:
        """The objective's value, 0-d, and what it is of, at the model's own parameters."""
        features, logits = self._backend._network(self._x)
        batch = Batch(features, logits, self._y)
        return self._backend.work.objective.value(batch, self._context), batch


class _Full:
    """The objective over all of a client's samples: in eval mode and not augmented, so that nothing is random."""

    def __init__(self, backend: SequentialBackend, started: Started) -> None:
        self._backend, self._started = backend, started

    def gradient(self, parameters: Tensor) -> Tensor:
        """The gradient of the mean objective, `(parameters,)`; zeros for a client without samples."""
        total = torch.zeros_like(parameters)
        for passes, share in self._parts():
            total.add_(passes.gradient(parameters), alpha=share)
        return total

    @torch.no_grad()
    def loss(self, parameters: Tensor) -> Tensor:
        """The mean objective, 0-d; 0 for a client without samples."""
        self._backend.model.write(parameters)
        return torch.stack(
            [parameters.new_zeros(()), *(passes.forward()[0] * share for passes, share in self._parts())]
        ).sum()

    def _parts(self) -> Iterator[tuple[_Passes, float]]:
        backend = self._backend
        backend._network.eval()
        backend.model.write_buffers(self._started.sent.model.buffers)
        if backend._teacher is not None:
            backend._teacher.become(self._started.sent.model)
        previous = backend._previous_of(self._started)
        inputs, targets, own, _ = self._started.samples
        for rows in torch.split(torch.from_numpy(own).to(targets.device), ROWS_AT_ONCE):
            if len(rows):
                x, y = inputs.index_select(0, rows), targets.index_select(0, rows)
                yield _Passes(backend, x, y, self._started.context, previous), len(rows) / len(own)
