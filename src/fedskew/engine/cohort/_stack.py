"""Clients whose parameters are stacked: who takes which step on which rows, and every step of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from fedskew.data import Inputs
from fedskew.engine._local_work import LocalWork, training_failed
from fedskew.engine._sequential import MOMENTUM, ClientResult, ClientSetup
from fedskew.engine.cohort._step import Held, Step, StepInputs
from fedskew.hooks import Hooks, Named
from fedskew.models import ModelState
from fedskew.objectives import Batch
from fedskew.randomness import Purpose, mix, stream_key


class Member:
    """One client of a stack."""

    def __init__(self, work: LocalWork, started: ClientSetup) -> None:
        self.work, self.started = work, started
        self.size, batch = work.training.samples_of_epoch(len(started.samples.rows)), work.training.batch_size
        self._epoch = -(-self.size // batch)  # steps of an epoch
        self.steps = started.task.epochs * self._epoch
        if started.task.steps is not None:
            self.steps = min(self.steps, started.task.steps)

    @property
    def kind(self) -> Any:
        """What must be the same in a stack: the round, and names and shapes of what was kept and sent."""
        named = self.started.state, self.started.sent.broadcast
        return self.started.round, *(tuple((name, value.shape) for name, value in one.items()) for one in named)

    def batches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of each step's batch, `(steps, batch size)`; a short batch is filled up with rows of the client."""
        task, size = self.started.task, self.work.training.batch_size
        if not self.steps:
            return np.zeros((0, size), dtype=np.int64)
        table = np.empty((-(-self.steps // self._epoch), self._epoch * size), dtype=np.int64)
        orders = self.work.epoch_orders(self.started.round, task.client, rows, task.epochs)
        for epoch, order in zip(table, orders, strict=False):
            epoch[: self.size], epoch[self.size :] = order, order[0]
        return table.reshape(-1, size)[: self.steps]

    def lengths(self) -> NDArray[np.int64]:
        """How many rows of each step's batch are real, `(steps,)`."""
        size = self.work.training.batch_size
        epoch = np.full(self._epoch, size, dtype=np.int64)
        epoch[-1:] = self.size - size * (self._epoch - 1)
        return np.resize(epoch, self.steps)

    def in_last_epoch(self, step: int) -> bool:
        """Whether a step is one of its last local epoch."""
        return step // self._epoch == self.started.task.epochs - 1

    def key(self, purpose: Purpose) -> int:
        """The key of its draws inside steps."""
        return stream_key(self.work.seed, purpose, self.started.round, self.started.task.client)


class Stack:
    """Clients of one kind in training, given with most steps first: the active ones are always the first rows.

    `apart`: their samples are copied out of the data set. `held`: what they have throughout; `active`: how many of them
    take each step; `rows`: of each one's batches, `(steps, clients, batch size)`; `sizes` and, on the device,
    `lengths`: how many of these are real, `(steps, clients)`, 0 where a client has finished; `dropout`: the keys of the
    dropout layers, `(steps, clients)`, None where there are none; `fewest`: rows of the smallest batch.
    """

    def __init__(self, step: Step, members: Sequence[Member], apart: bool = False) -> None:
        self.members, self.settings = members, members[0].started.settings
        self.work, self._step, self._device = step.work, step, self.settings.start.device
        inputs, targets, rows = self._data(apart)
        self.held = Held(inputs, targets, members[0].started.sent, self._own(), self._augmentation())
        self._schedule(rows)

    def train(self) -> list[ClientResult]:
        """Every step of every client, in the order of the members."""
        members, work = self.members, self.work
        model, carried = self.begin()
        ended = left(model, carried, slice(self.active[0] if self.active else 0, len(members)))
        gathering = {name: hooks for name, hooks in work.hooks.items() if type(hooks).gather is not Hooks.gather}
        gathered: list[dict[str, Named]] = [{name: {} for name in work.hooks} for _ in members]
        totals = torch.zeros(len(members), device=self._device)
        for number, active in enumerate(self.active):
            model, carried = _first((model, carried), active)
            try:
                taken = self._step.take(
                    self._first_held(active), self._step_inputs(number), self.settings, model, carried
                )
            except (RuntimeError, ValueError) as error:
                clients = ", ".join(str(member.started.task.client) for member in members[:active])
                where = f"round {members[0].started.round}, clients {clients}, step {number}"
                raise training_failed(where, error) from error
            model, carried = taken.model, taken.carried
            totals[:active] += taken.values * self.lengths[number, :active]
            for name, hooks in gathering.items():
                for place, member in enumerate(members[:active]):
                    rows = int(self.sizes[number, place])
                    batch = Batch(*(part[place, :rows] for part in taken.batch[:3]))
                    gathered[place][name] = hooks.gather(gathered[place][name], batch, member.in_last_epoch(number))
            following = self.active[number + 1] if number + 1 < len(self.active) else 0
            ended = left(model, carried, slice(following, active)) + ended
        return self.ended(ended, totals, gathered)

    def begin(self) -> tuple[ModelState, Tensor | None]:
        """Every client's model and what its local step carries, before the first step."""
        members, sent = self.members, self.held.sent.model
        if "sent" in self.held.own:
            model = self.held.own["sent"]
        else:
            model = ModelState(*(part.expand(len(members), -1) for part in sent))
        # Cloned, because layers of a user's own may write to buffers in place.
        model = model._replace(buffers=model.buffers.clone(), integers=model.integers.clone())
        fresh = self.work.local_step.init(self.settings)
        if fresh is None:
            return model, None
        return model, torch.stack([member.started.state.get(MOMENTUM, fresh) for member in members])

    def ended(
        self,
        left: Sequence[tuple[ModelState, Tensor | None]],
        totals: Tensor,
        gathered: Sequence[dict[str, Named]],
    ) -> list[ClientResult]:
        """The members after their last step; `totals`: of their objectives over all samples seen, `(clients,)`."""
        losses = (totals / self.lengths.sum(0).clamp(min=1)).tolist()
        return [
            ClientResult(model, carried, member.steps, loss, own)
            for member, (model, carried), loss, own in zip(self.members, left, losses, gathered, strict=True)
        ]

    def _own(self) -> dict[str, Any]:
        """What each client has of its own throughout; with one server, what it sent is everybody's and not in it."""
        started = [member.started for member in self.members]
        own: dict[str, Any] = {
            "counts": torch.stack([one.context.counts for one in started]),
            "client": {name: torch.stack([one.state[name] for one in started]) for name in started[0].state},
        }
        sent = started[0].sent
        if any(one.sent is not sent for one in started):
            own["sent"] = ModelState(*map(torch.stack, zip(*(one.sent.model for one in started), strict=True)))
            own["broadcast"] = {
                name: torch.stack([one.sent.broadcast[name] for one in started]) for name in sent.broadcast
            }
        return own

    def _augmentation(self) -> Tensor | None:
        """The keys of augmentation, `(clients, 1)`."""
        if self.work.augment is None:
            return None
        keys = torch.tensor([member.key(Purpose.AUGMENTATION) for member in self.members])
        return keys.unsqueeze(1).to(self._device)

    def _data(self, apart: bool) -> tuple[Inputs, Tensor, list[NDArray[np.int64]]]:
        """Inputs and targets that hold all clients' samples, and each one's rows; a copy of those if several."""
        samples = [member.started.samples for member in self.members]
        inputs, targets, _, _ = samples[0]
        if not apart and all(one.inputs is inputs and one.targets is targets for one in samples):
            return inputs, targets, [one.rows for one in samples]
        picked = [(one, torch.from_numpy(one.rows).to(one.targets.device)) for one in samples]
        ends = np.cumsum([len(one.rows) for one in samples])
        return (
            torch.cat([one.inputs.index_select(0, rows) for one, rows in picked]),
            torch.cat([one.targets.index_select(0, rows) for one, rows in picked]),
            [np.arange(end - len(one.rows), end) for one, end in zip(samples, ends, strict=True)],
        )

    def _schedule(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Who does what in each step."""
        members, steps = self.members, self.members[0].steps
        table = np.zeros((steps, len(members), self.work.training.batch_size), dtype=np.int64)
        self.sizes = np.zeros((steps, len(members)), dtype=np.int64)
        for place, (member, own) in enumerate(zip(members, rows, strict=True)):
            table[: member.steps, place] = member.batches(own)
            self.sizes[: member.steps, place] = member.lengths()
        self.active: list[int] = (self.sizes > 0).sum(1).tolist()
        self.fewest = min(self.sizes[self.sizes > 0].tolist(), default=0)
        self.rows = torch.from_numpy(table).to(self._device)
        self.lengths = torch.from_numpy(self.sizes).to(self._device)
        self.dropout: Tensor | None = None
        if self._step.networks.train.has_dropout:
            keys = torch.tensor([member.key(Purpose.DROPOUT_LAYER) for member in members])
            self.dropout = mix(0, keys, torch.arange(steps).unsqueeze(1)).to(self._device)

    def _step_inputs(self, number: int) -> StepInputs:
        """One step of the active clients, as wide as the longest batch."""
        active = self.active[number]
        sizes = self.sizes[number, :active]
        width, fewest = int(sizes.max()), int(sizes.min())
        mask = None
        if fewest < width:
            mask = torch.arange(width, device=self._device) < self.lengths[number, :active].unsqueeze(1)
        dropout = None if self.dropout is None else self.dropout[number, :active]
        return StepInputs(number, self.rows[number, :active, :width], mask, fewest, dropout)

    def _first_held(self, clients: int) -> Held:
        """What the first clients hold."""
        augmentation = None if self.held.augmentation is None else self.held.augmentation[:clients]
        return self.held._replace(own=_first(self.held.own, clients), augmentation=augmentation)


def left(model: ModelState, carried: Tensor | None, done: slice) -> list[tuple[ModelState, Tensor | None]]:
    """What each of the clients that are done leaves with; copied where others go on, so as not to hold on to theirs."""
    clients = done.stop - done.start
    parts = [
        part[done] if clients == len(part) else part[done].clone() for part in (*model, carried) if part is not None
    ]
    rows = zip(*(part.unbind() for part in parts), strict=True)
    return [(ModelState(*row[:3]), row[3] if len(row) > 3 else None) for row in rows]


def _first(tree: Any, clients: int) -> Any:
    """The first rows of every tensor of a tree."""
    return tree_map(lambda part: None if part is None else part[:clients], tree)
