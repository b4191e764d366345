"""One client after another, on one model in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew.data import Augmentation
from fedskew.engine._backend import Assignment, LocalTraining, Sent, Update
from fedskew.errors import RunError
from fedskew.hooks import Hooks, LocalEnd
from fedskew.local_steps import LocalStep, StepSettings
from fedskew.models import Dropout, FlatModel, ModelState, Outputs, with_features
from fedskew.objectives import Batch, Context, Objective
from fedskew.randomness import Purpose, fold, generator, mix, stream_key

Observer = Callable[[int, nn.Module], None]
"""Called with a client and its model right after its local training, before the next client's."""

ROWS_AT_ONCE = 1000
MOMENTUM = "training.momentum"


@dataclass
class Sequential:
    """Trains a cohort client by client.

    `inputs`, `(samples, ...)`, and `targets`, `(samples,)`, are on the model's device; `samples[k]` are the rows of
    client k, and `counts[k]` its label counts. Shuffles, dropout and augmentation depend on (seed, round, client) only.
    `hooks`: the method's fillers that have any, by name.
    """

    model: FlatModel
    inputs: Tensor
    targets: Tensor
    samples: Sequence[NDArray[np.int64]]
    counts: NDArray[np.float64]
    objective: Objective
    local_step: LocalStep
    training: LocalTraining
    seed: int
    augment: Augmentation | None = None
    observe: Observer | None = None
    hooks: Mapping[str, Hooks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._network = with_features(self.model.module)
        self._dropouts = [layer for layer in self.model.module.modules() if isinstance(layer, Dropout)]
        batch_statistics = self.training.teacher_train_mode
        self._teacher = _Frozen(self.model, batch_statistics) if "teacher" in self.objective.reads else None
        self._previous = _Frozen(self.model) if "previous" in self.objective.reads else None

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        if self._teacher is not None:
            self._teacher.become(sent.model)
        return [self._train(round, task, sent) for task in cohort]

    def _train(self, round: int, task: Assignment, sent: Sent) -> Update:
        start, training, client = sent.model.parameters, self.training, task.client
        kept = {name: value.to(start.device) for name, value in task.state.items()}  # those from files are on the CPU
        settings = StepSettings(
            start=start,
            lr=training.lr * training.lr_decay ** (round - 1),
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            broadcast=sent.broadcast,
            client=kept,
        )
        rows = self.samples[client] if task.quota is None else self._drawn(round, client, task.quota)
        held = self.counts[client] if task.quota is None else task.quota
        context = Context(torch.as_tensor(held, dtype=start.dtype, device=start.device), broadcast=sent.broadcast)
        self.model.write_state(sent.model)
        self._network.train()
        previous = self._previous_of(kept, sent)
        parameters, carried = start, kept.get(MOMENTUM, self.local_step.init(start))
        dropout_key = stream_key(self.seed, Purpose.DROPOUT_LAYER, round, client)
        augmentation_key = stream_key(self.seed, Purpose.AUGMENTATION, round, client)
        gathered: dict[str, Mapping[str, Tensor]] = {name: {} for name in self.hooks}
        total, seen, steps = torch.zeros((), device=start.device), 0, 0
        for epoch, batch in islice(self._batches(round, client, rows, task.epochs), task.steps):
            for layer in self._dropouts:
                layer.key.fill_(fold(dropout_key, steps))
            x, y = self.inputs.index_select(0, batch), self.targets.index_select(0, batch)
            if self.augment is not None:
                x = self.augment(x, mix(torch.arange(len(batch), device=x.device), augmentation_key, steps))
            passes = _Passes(self, x, y, context, previous)
            try:
                parameters, carried = self.local_step.step(parameters, passes.gradient, carried, settings)
            except (RuntimeError, ValueError) as error:
                where = f"round {round}, client {client}, step {steps} ({len(batch)} samples)"
                raise RunError(f"{where}: local training failed: {' '.join(str(error).split())}") from error
            for name, hooks in self.hooks.items():
                gathered[name] = hooks.gather(gathered[name], passes.batch, epoch == task.epochs - 1)
            total += passes.value * len(batch)
            seen += len(batch)
            steps += 1
        self.model.write(parameters)
        trained = self.model.read_state()
        if self.observe is not None:
            self.observe(client, self.model.module)
        reply: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        if training.persist_momentum and carried is not None:
            state[MOMENTUM] = carried
        full = _Full(self, rows, context, previous, sent.model.buffers)
        for name, hooks in self.hooks.items():
            own, returned = hooks.end_local(
                LocalEnd(
                    start=start,
                    parameters=parameters,
                    buffers=trained.buffers,
                    steps=steps,
                    lr=settings.lr,
                    momentum=settings.momentum,
                    client=kept,
                    broadcast=sent.broadcast,
                    gathered=gathered[name],
                    full_gradient=full.gradient,
                    full_loss=full.loss,
                )
            )
            state |= own
            reply |= returned
        return Update(
            client=client,
            change=parameters - start,
            buffers=trained.buffers,
            integers=trained.integers,
            steps=steps,
            loss=float(total) / seen if seen else 0.0,
            reply=reply,
            state=state,
        )

    def _previous_of(self, kept: Mapping[str, Tensor], sent: Sent) -> _Frozen | None:
        """The model that this client ended its last participation with; None at its first."""
        if self._previous is None or "previous.parameters" not in kept:
            return None
        state = ModelState(kept["previous.parameters"], kept["previous.buffers"], sent.model.integers)
        self._previous.become(state)
        return self._previous

    def _drawn(self, round: int, client: int, quota: NDArray[np.float64]) -> NDArray[np.int64]:
        """As many of a client's samples of each class as its quota says."""
        samples = self.samples[client]
        labels = self.targets[torch.from_numpy(samples).to(self.targets.device)].cpu().numpy()
        rng = generator(self.seed, Purpose.QUOTA, round, client)
        drawn = [rng.permutation(samples[labels == label])[: int(share)] for label, share in enumerate(quota)]
        return np.concatenate(drawn)

    def _batches(
        self, round: int, client: int, samples: NDArray[np.int64], epochs: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Rows of every batch of every epoch, in a fresh order each epoch; the last short batch is kept."""
        if len(samples) == 0:
            return
        rng = generator(self.seed, Purpose.SHUFFLE, round, client)
        for epoch in range(epochs):
            order = torch.from_numpy(samples[rng.permutation(len(samples))]).to(self.inputs.device)
            for batch in torch.split(order, self.training.batch_size):
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

    def __init__(self, backend: Sequential, x: Tensor, y: Tensor, context: Context, previous: _Frozen | None) -> None:
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
        model.zero_gradient()
        value, batch = self.forward()
        value.backward()  # type: ignore[no-untyped-call]
        if self._first:
            self.value, self._seen, self._first = value.detach(), batch, False
        return model.gradient

    @property
    def batch(self) -> Batch:
        """The batch as the network saw it, without gradient."""
        return Batch(self._seen.features.detach(), self._seen.logits.detach(), self._seen.targets)

    def forward(self) -> tuple[Tensor, Batch]:
        """The objective's value, 0-d, and what it is of, at the model's own parameters."""
        features, logits = self._backend._network(self._x)
        batch = Batch(features, logits, self._y)
        return self._backend.objective.value(batch, self._context), batch


class _Full:
    """The objective over all of a client's samples: in eval mode and not augmented, so that nothing is random."""

    def __init__(
        self,
        backend: Sequential,
        rows: NDArray[np.int64],
        context: Context,
        previous: _Frozen | None,
        buffers: Tensor,
    ) -> None:
        self._backend, self._rows, self._context, self._previous = backend, rows, context, previous
        self._buffers = buffers

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
        backend.model.write_buffers(self._buffers)
        for rows in torch.split(torch.from_numpy(self._rows).to(backend.inputs.device), ROWS_AT_ONCE):
            if len(rows):
                x, y = backend.inputs.index_select(0, rows), backend.targets.index_select(0, rows)
                yield _Passes(backend, x, y, self._context, self._previous), len(rows) / len(self._rows)
