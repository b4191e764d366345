"""Trains the clients of a cohort one after another, in place on one model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.components import seen_by
from fedskew.engine._backend import (
    Assignment,
    Backend,
    ClientSamples,
    LocalWork,
    Observer,
    Schedule,
    Sent,
    Update,
    flush_denormals,
    require_gradient,
    reuse_freed_memory,
    training_failed,
)
from fedskew.engine._faults import own_network, watched
from fedskew.engine._sight import ClientLog
from fedskew.engine.contracts import calling, checked_carried, checked_figure, checked_step, is_own, name_in, tensors
from fedskew.engine.heeding import HEEDED, check_heeds
from fedskew.errors import ComponentError, RunError
from fedskew.hooks import LocalEnd, Named
from fedskew.local_steps import SGD, StepSettings, corrected, steps_in_place
from fedskew.models import Dropout, FlatModel, ModelState, Outputs
from fedskew.models.frozen import hold_still
from fedskew.objectives import Batch, Context, Objective
from fedskew.randomness import Purpose, fold, mix, stream_key
from fedskew.tables import counted

ROWS_AT_ONCE = 1000
KEPT_NUMBERS = 2**26
"""Of frozen models' outputs on a client's samples, so many are kept from one epoch to the next: 256 MB a process."""
PERSISTENT = "training."
"""Begins the names of what a client's local step carried, in the client's state."""


class ClientSetup(NamedTuple):
    """Everything that a client's local steps need. `sent` is what it begins with: the `common` model as it was sent,
    with layers that the client has for itself. `state` is what the client kept, on the training device."""

    round: int
    task: Assignment
    sent: Sent
    common: ModelState
    state: Mapping[str, Tensor]
    samples: ClientSamples
    settings: StepSettings
    context: Context


class ClientResult(NamedTuple):
    """The result of a client's local steps; `gathered` by hooks, by place in the method, and `logged` by components."""

    model: ModelState
    carried: Named
    steps: int
    loss: float
    gathered: Mapping[str, Mapping[str, Tensor]]
    logged: Mapping[str, float]


@dataclass
class SequentialBackend(Backend):
    """Trains a cohort client by client, in place on one model; the reference for all other backends."""

    name: ClassVar[str] = "sequential"
    model: FlatModel
    work: LocalWork
    observe: Observer | None = None

    def __post_init__(self) -> None:
        self._dropouts = [layer for layer in self.model.module.modules() if isinstance(layer, Dropout)]
        self.is_sloped = self.work.objective.is_sloped
        reads = self.work.objective.reads
        batch_statistics = self.work.training.teacher_train_mode
        self.model.network.bf16 = self.work.training.precision == "bf16"
        self._of_parameters = self.work.training.of_parameters(self.model)
        step = self.work.local_step
        own = is_own(step) or is_own(getattr(step, "inner", step))
        self._unproven = [name for name in HEEDED if own and getattr(self.work.training, name)]
        self._teacher = _FrozenModel(self.model, batch_statistics) if "teacher" in reads else None
        self._previous = _FrozenModel(self.model) if "previous" in reads else None

    def open(self) -> None:
        """Let memory be reused."""
        reuse_freed_memory(True)

    def close(self) -> None:
        """Return free memory to the system."""
        reuse_freed_memory(False)

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        start = sent.model.parameters
        return list(self.train_each(round, cohort, sent, start.new_empty(len(cohort), start.numel())))

    def train_each(
        self, round: int, cohort: Sequence[Assignment], sent: Sent, rows: Tensor | None = None
    ) -> Iterator[Update]:
        """See `Backend.train_each`; `rows` is memory for the changes: a row for each client, or one for all."""
        if self._teacher is not None:
            self._teacher.load(sent.model)
        rows = torch.empty_like(sent.model.parameters)[None] if rows is None else rows
        for place, task in enumerate(cohort):
            setup = self.set_up(round, task, sent)
            yield self.finish(setup, self._train(setup), rows[place % len(rows)])

    def train_client(self, round: int, task: Assignment, sent: Sent) -> tuple[Update, ModelState]:
        """Train one client, as a real site does; return its update, and its model without rounding.

        What never leaves the client is in the model as it was sent.
        The model may be a view of the backend's own, which the backend overwrites at its next use.
        """
        if self._teacher is not None:
            self._teacher.load(sent.model)
        setup = self.set_up(round, task, sent)
        result, private = self._train(setup), self.work.private
        update = self.finish(setup, result)
        return update, result.model if private is None else private.shared(result.model, setup.common)

    def find_fault(self, round: int, task: Assignment, sent: Sent) -> ComponentError | None:
        """See `Backend.find_fault`."""
        if not any(map(is_own, self.work.components)) and own_network(self.model.module) is None:
            return None
        watching = SequentialBackend(self.model, watched(self.work, self.model))
        try:
            watching.train_client(round, task, sent)
        except ComponentError as error:
            where = f"round {round}, client {task.client}"
            return error if str(error).startswith(where) else ComponentError(f"{where}: {error}")
        except RunError:
            return None
        return None

    def ask_losses(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[float]:
        """See `Backend.ask_losses`."""
        setups = [self.set_up(round, task, sent) for task in cohort]
        return [float(_FullObjective(self, setup).value(setup.settings.start)) for setup in setups]

    def set_up(self, round: int, task: Assignment, sent: Sent) -> ClientSetup:
        """Prepare a client's local training: its samples, settings and context."""
        common, device = sent.model, sent.model.parameters.device
        state = {name: value.to(device) for name, value in task.state.items()}  # from files: on the CPU
        samples = self.work.samples(round, task)
        if (private := self.work.private) is not None:
            sent = sent._replace(model=private.start(common, state))
            state |= private.steps(self.work.training.batches_of_epoch(len(samples.rows)))
        counts = torch.as_tensor(samples.counts, dtype=common.parameters.dtype, device=device)
        settings = self.work.training.settings(round, sent.model.parameters)
        settings = settings._replace(broadcast=sent.broadcast, client=state, **self._of_parameters)
        context = Context(counts, broadcast=sent.broadcast, kept={})
        if self._unproven:
            with calling("local_step", self.work.local_step, "step", f"round {round}, client {task.client}: "):
                seen = {"layout": self.model.layout, "log": checked_figure}
                check_heeds(self.work.local_step, self._unproven, settings, seen)
        self._unproven = []
        return ClientSetup(round, task, sent, common, state, samples, settings, context)

    def finish(self, setup: ClientSetup, result: ClientResult, row: Tensor | None = None) -> Update:
        """Make the update of a client that has taken its last local step; `row` is memory for its change."""
        work, start = self.work, setup.settings.start
        observed = None
        if self.observe is not None:
            self.model.write_state(result.model)
            observed = self.observe(setup.round, setup.task.client, self.model.network)
        reply: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        if work.training.keep_optimizer:
            state |= {PERSISTENT + name: part for name, part in result.carried.items()}
        full, log = _FullObjective(self, setup), ClientLog()
        seen = {"layout": self.model.layout, "log": log}
        for name, hooks in work.hooks.items():
            end = LocalEnd(
                start=start,
                parameters=result.model.parameters,
                buffers=result.model.buffers,
                steps=result.steps,
                lr=float(setup.settings.lr),
                momentum=setup.settings.momentum,
                client=setup.state,
                broadcast=setup.sent.broadcast,
                gathered=result.gathered[name],
                full_gradient=full.gradient,
                full_loss=full.value,
            )
            with calling(name, hooks, "end_local", where := f"round {setup.round}, client {setup.task.client}: "):
                own, returned = hooks.end_local(end, **seen_by(hooks.end_local, seen))
            own, returned = (tensors(name, hooks, "end_local", one, where) for one in (own, returned))
            whole = [key for key, part in returned.items() if work.private is not None and part.shape == start.shape]
            if whole:
                raise ComponentError(
                    f"{name_in(name, hooks)} sends {whole[0]}, a number for each parameter, and layers are to stay "
                    "at the client (method.personal); take another, or a personal component that keeps none"
                )
            state |= own
            reply |= returned
        change, buffers = torch.sub(result.model.parameters, start, out=row), result.model.buffers
        if (private := work.private) is not None:
            state |= private.kept(result.model)
            change[private.parameters] = 0
            buffers = torch.where(private.buffers, setup.common.buffers, buffers)
        return Update(
            client=setup.task.client,
            change=change,
            norm=torch.linalg.vector_norm(change),
            buffers=buffers,
            integers=result.model.integers,
            steps=result.steps,
            loss=result.loss,
            reply=reply,
            state=state,
            observed=observed,
            logged={**result.logged, **log.means()},
        )

    @flush_denormals()
    def _train(self, setup: ClientSetup) -> ClientResult:
        work = self.work
        round, task, samples, client = setup.round, setup.task, setup.samples, setup.task.client
        if self._teacher is not None and work.private is not None:
            self._teacher.load(setup.sent.model)
        self.model.write_state(setup.sent.model)
        self.model.network.train()
        step = work.local_step
        with calling("local_step", step, "correction", f"round {round}, client {client}: "):
            settings = corrected(step, setup.settings)
        carried, in_place, log = carried_first(work, setup), steps_in_place(step), ClientLog()
        seen, context = seen_by(step.step, {"layout": self.model.layout, "log": log}), setup.context._replace(log=log)
        # A copy, as a step may write to it, and what was sent is the next client's, too.
        parameters = settings.start.clone() if in_place is None else self.model.vector
        dropout_key = stream_key(work.seed, Purpose.DROPOUT_LAYER, round, client)
        augmentation_key = stream_key(work.seed, Purpose.AUGMENTATION, round, client)
        gathered: dict[str, Mapping[str, Tensor]] = {name: {} for name in work.hooks}
        total, trained, steps = torch.zeros((), device=settings.start.device), 0, 0
        rate = settings.plain_rate() if type(step) is SGD else None
        schedule = work.schedule(task, len(samples.rows))
        outputs = _FrozenOutputs(self._frozen(setup), samples if work.repeats(samples, schedule) else None)
        for rows in islice(self._batches(round, task, samples, schedule), schedule.steps):
            for layer in self._dropouts:
                layer.key.fill_(fold(dropout_key, steps))
            x, y, size = samples.inputs.index_select(0, rows), samples.targets.index_select(0, rows), rows.shape[0]
            if work.augment is not None:
                x = work.augment(x, mix(torch.arange(size, device=x.device), augmentation_key, steps))
            beside = outputs.beside(context, x, rows, steps < schedule.of_epoch)
            objective = _BatchObjective(self, x, y, beside)
            try:
                if rate is not None and objective.descend(rate):
                    pass
                elif in_place is not None:
                    in_place.step_in_place(parameters, objective.gradient, carried, settings)
                else:
                    stepped = step.step(parameters, objective.gradient, carried, settings, **seen)
                    parameters, carried = checked_step(step, stepped, parameters)
                require_gradient(step, objective)
            except Exception as error:
                where = f"round {round}, client {client}, step {steps} ({counted(size, 'sample')})"
                raise training_failed(where, error) from error
            for name, hooks in work.hooks.items():
                gathered[name] = hooks.gather(gathered[name], objective.batch, schedule.in_last_epoch(steps))
            total.add_(objective.first, alpha=size)
            trained += size
            steps += 1
        self.model.write(parameters)
        # Without hooks nothing writes to the model before `finish` has read it, so no copy is made: copying a wide
        # model takes milliseconds.
        state = self.model.read_state(copied=bool(work.hooks))
        return ClientResult(state, carried, steps, float(total) / trained if trained else 0.0, gathered, log.means())

    def _frozen(self, setup: ClientSetup) -> "dict[str, _FrozenModel]":
        """Return the models that losses read beside the trained one, by their names in a context: the sent one, and
        that of the end of the client's last participation, if there was one."""
        models, state = {} if self._teacher is None else {"teacher": self._teacher}, setup.state
        if self._previous is not None and "previous.parameters" in state:
            integers = setup.sent.model.integers
            self._previous.load(ModelState(state["previous.parameters"], state["previous.buffers"], integers))
            models["previous"] = self._previous
        return models

    def _batches(self, round: int, task: Assignment, samples: ClientSamples, schedule: Schedule) -> Iterator[Tensor]:
        """Yield the rows of every batch of the epochs that are begun."""
        for order in self.work.epoch_orders(round, task.client, samples, samples.rows, schedule.epochs):
            yield from torch.split(torch.from_numpy(order).to(samples.targets.device), self.work.training.batch_size)


def carried_first(work: LocalWork, setup: ClientSetup) -> dict[str, Tensor]:
    """Return what a client's first step is given: what its last one kept, where clients keep it, or what is new."""
    step, state = work.local_step, setup.state
    with calling("local_step", step, "init", f"round {setup.round}, client {setup.task.client}: "):
        fresh = checked_carried(step, step.init(setup.settings))
    if setup.settings.adam is not None and not fresh.keys() >= SGD().init(setup.settings).keys():
        raise ComponentError(
            f"{name_in('local_step', step)}: init() returns nothing that Adam carries, so its steps would not be those "
            "of training.optimizer; return what SGD().init(settings) returns, and step by SGD().step(...)"
        )
    return {
        name: state[PERSISTENT + name].clone() if PERSISTENT + name in state else part for name, part in fresh.items()
    }


class _FrozenModel:
    """A frozen copy of the model for inference, in eval mode; with `batch_statistics` batch norm stays in training."""

    def __init__(self, model: FlatModel, batch_statistics: bool = False) -> None:
        self._model = model.copy()
        self._model.network.eval()
        for layer in self._model.module.modules():
            if batch_statistics and isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()
        hold_still(self._model.module)
        by_batch = any(getattr(one, "track_running_stats", True) is False for one in self._model.module.modules())
        # Of others' layers nobody knows whether what they say of a sample depends on the batch.
        self.by_sample = not by_batch and own_network(self._model.module) is None

    def load(self, state: ModelState) -> None:
        self._model.write_state(state)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Outputs:
        return self._model.outputs(x)


class _FrozenOutputs:
    """What frozen models return on a client's samples: of `samples` computed in the first epoch, and kept for further
    ones if there is room, and outputs depend on no other sample; None: computed for each batch."""

    def __init__(self, models: Mapping[str, _FrozenModel], samples: ClientSamples | None = None) -> None:
        self._models, self._kept = models, dict[str, Outputs]()
        self._rows: Tensor | None = None
        if samples is not None and models and all(model.by_sample for model in models.values()):
            self._rows = torch.from_numpy(samples.rows).to(samples.targets.device).sort().values

    def beside(self, context: Context, x: Tensor, rows: Tensor, in_first_epoch: bool = True) -> Context:
        """Return a context with the outputs on a batch of these rows."""
        at = None if self._rows is None else torch.searchsorted(self._rows, rows)
        if at is None or in_first_epoch:
            seen = {name: model(x) for name, model in self._models.items()}
        else:
            seen = {name: Outputs(*(part.index_select(0, at) for part in kept)) for name, kept in self._kept.items()}
        if at is not None and in_first_epoch:
            self._keep(seen, at)
        return context._replace(teacher=seen.get("teacher"), previous=seen.get("previous"))

    def _keep(self, seen: Mapping[str, Outputs], at: Tensor) -> None:
        assert self._rows is not None, "the client's rows are known where something is kept"
        if len(self._rows) * sum(part.shape[1] for outputs in seen.values() for part in outputs) > KEPT_NUMBERS:
            self._rows, self._kept = None, {}
            return
        for name, outputs in seen.items():
            if name not in self._kept:
                self._kept[name] = Outputs(*(part.new_empty(len(self._rows), part.shape[1]) for part in outputs))
            for kept, part in zip(self._kept[name], outputs, strict=True):
                kept[at] = part


class _BatchObjective:
    """The objective on one batch, and its gradient, at any parameters; `first` is its value at the step's beginning."""

    first: Tensor
    batch: Batch

    def __init__(self, backend: SequentialBackend, x: Tensor, y: Tensor, context: Context) -> None:
        self._backend, self._x, self._y, self._context = backend, x, y, context
        self.is_evaluated = False

    def gradient(self, parameters: Tensor, part: str | int | None = None) -> Tensor:
        """Compute the gradient, `(parameters,)`, in the model's own vector, which the next call overwrites."""
        model = self._backend.model
        model.write(parameters)
        if part is None:
            value, outputs = model.differentiate(*self._whole())
        else:
            alone = partial(self._value, objective=self._backend.work.objective.part(part))
            value, outputs = model.differentiate(self._x, alone)
        if not self.is_evaluated:
            if part is not None:
                value = self._value(outputs)
            self._note(value, outputs)
        return model.gradient

    def descend(self, rate: float) -> bool:
        """Move the model against the gradient by `rate`, where it can do that at once; return whether it did."""
        found = self._backend.model.descend(rate, *self._whole())
        if found is not None:
            self._note(*found)
        return found is not None

    def _note(self, value: Tensor, outputs: Outputs) -> None:
        self.first, self.batch, self.is_evaluated = value, Batch(*outputs, self._y), True

    @torch.no_grad()
    def value(self) -> Tensor:
        """Compute the objective, 0-d, at the model's current parameters."""
        return self._value(self._backend.model.outputs(self._x))

    def _whole(self) -> tuple[Any, ...]:  # not kept: it would be a cycle, which holds the batch until it is collected
        return self._x, self._value, self._slope if self._backend.is_sloped else None

    def _slope(self, outputs: Outputs) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self._backend.work.objective.slope(Batch(*outputs, self._y), self._context)

    def _value(self, outputs: Outputs, objective: Objective | None = None) -> Tensor:
        return (objective or self._backend.work.objective).value(Batch(*outputs, self._y), self._context)


class _FullObjective:
    """The mean objective over all of a client's samples, in eval mode and without augmentation: nothing is random."""

    def __init__(self, backend: SequentialBackend, setup: ClientSetup) -> None:
        self._backend, self._setup = backend, setup

    def gradient(self, parameters: Tensor) -> Tensor:
        """Compute the gradient, `(parameters,)`; zeros for a client without samples."""
        total = torch.zeros_like(parameters)
        for objective, share in self._parts():
            total.add_(objective.gradient(parameters), alpha=share)
        return total

    @torch.no_grad()
    def value(self, parameters: Tensor) -> Tensor:
        """Compute the mean objective, 0-d; 0 for a client without samples."""
        self._backend.model.write(parameters)
        parts = (objective.value() * share for objective, share in self._parts())
        return torch.stack([parameters.new_zeros(()), *parts]).sum()

    def _parts(self) -> Iterator[tuple[_BatchObjective, float]]:
        """Yield the objective on at most `ROWS_AT_ONCE` samples, and their share of the client's samples."""
        backend = self._backend
        backend.model.network.eval()
        backend.model.write_buffers(self._setup.sent.model.buffers)
        if backend._teacher is not None:
            backend._teacher.load(self._setup.sent.model)
        outputs, context = _FrozenOutputs(backend._frozen(self._setup)), self._setup.context
        inputs, targets, own, *_ = self._setup.samples
        for rows in torch.split(torch.from_numpy(own).to(targets.device), ROWS_AT_ONCE):
            if len(rows):
                x, y = inputs.index_select(0, rows), targets.index_select(0, rows)
                yield _BatchObjective(backend, x, y, outputs.beside(context, x, rows)), len(rows) / len(own)
