"""Clients whose parameters are stacked: which client takes which step on which rows, and all steps of all of them."""

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
from fedskew.engine.cohort._step import StackData, Step, StepInputs
from fedskew.hooks import Hooks, Named
from fedskew.models import ModelState
from fedskew.objectives import Batch
from fedskew.randomness import Purpose, mix, stream_key


class StackedClient:
    """One client of a stack."""

    def __init__(self, work: LocalWork, setup: ClientSetup) -> None:
        self.work, self.setup = work, setup
        self.size, batch = work.training.samples_of_epoch(len(setup.samples.rows)), work.training.batch_size
        self._epoch = -(-self.size // batch)  # steps of an epoch
        self.steps = setup.task.epochs * self._epoch
        if setup.task.steps is not None:
            self.steps = min(self.steps, setup.task.steps)

    @property
    def kind(self) -> Any:
        """What must be the same in a stack: the round, and names and shapes of what was kept and sent."""
        named = self.setup.state, self.setup.sent.broadcast
        return self.setup.round, *(tuple((name, value.shape) for name, value in one.items()) for one in named)

    def batches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of each step's batch, `(steps, batch size)`; a short batch is padded with rows of the client."""
        task, size = self.setup.task, self.work.training.batch_size
        if not self.steps:
            return np.zeros((0, size), dtype=np.int64)
        table = np.empty((-(-self.steps // self._epoch), self._epoch * size), dtype=np.int64)
        orders = self.work.epoch_orders(self.setup.round, task.client, rows, task.epochs)
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
        """Whether a step belongs to its last local epoch."""
        return step // self._epoch == self.setup.task.epochs - 1

    def key(self, purpose: Purpose) -> int:
        """The key of its random draws inside steps."""
        return stream_key(self.work.seed, purpose, self.setup.round, self.setup.task.client)


class StackTrainer:
    """Trains stacks of clients.

    `not_captured`: why steps are not captured where they were to be; None without a reason.
    """

    not_captured: str | None = None

    def __init__(self, step: Step) -> None:
        self.step = step

    def train(self, clients: Sequence[StackedClient]) -> list[ClientResult]:
        """All steps of clients of one kind, which are given with most steps first."""
        return Stack(self.step, clients).train()


class Stack:
    """The data and the schedule of clients of one kind, with most steps first, so that active ones are always first.

    With `apart`, their samples are copied out of the data set.

    Attributes:
        data: What stays the same during their training.
        active: How many clients take each step.
        rows: Rows of each batch, `(steps, clients, batch size)`.
        sizes: How many of these are real, `(steps, clients)`; 0 where a client has finished.
        lengths: The same on the device.
        dropout: Keys of the dropout layers, `(steps, clients)`; None without dropout.
        smallest: Number of real rows in the smallest batch.
    """

    def __init__(self, step: Step, clients: Sequence[StackedClient], apart: bool = False) -> None:
        self.clients, self.settings = clients, clients[0].setup.settings
        self.work, self._step, self._device = step.work, step, self.settings.start.device
        inputs, targets, rows = self._samples(apart)
        self.data = StackData(inputs, targets, clients[0].setup.sent, self._own(), self._augmentation())
        self._schedule(rows)

    def train(self) -> list[ClientResult]:
        """All steps of all clients; results in the order of the clients."""
        clients, work = self.clients, self.work
        model, carried = self.start()
        finished = split_clients(model, carried, slice(self.active[0] if self.active else 0, len(clients)))
        gathering = {name: hooks for name, hooks in work.hooks.items() if type(hooks).gather is not Hooks.gather}
        gathered: list[dict[str, Named]] = [{name: {} for name in work.hooks} for _ in clients]
        totals = torch.zeros(len(clients), device=self._device)
        for number, active in enumerate(self.active):
            model, carried = _first((model, carried), active)
            try:
                result = self._step.take(
                    self._first_data(active), self._step_inputs(number), self.settings, model, carried
                )
            except (RuntimeError, ValueError) as error:
                names = ", ".join(str(client.setup.task.client) for client in clients[:active])
                where = f"round {clients[0].setup.round}, clients {names}, step {number}"
                raise training_failed(where, error) from error
            model, carried = result.model, result.carried
            totals[:active] += result.values * self.lengths[number, :active]
            for name, hooks in gathering.items():
                for index, client in enumerate(clients[:active]):
                    rows = int(self.sizes[number, index])
                    batch = Batch(*(part[index, :rows] for part in result.batch[:3]))
                    gathered[index][name] = hooks.gather(gathered[index][name], batch, client.in_last_epoch(number))
            following = self.active[number + 1] if number + 1 < len(self.active) else 0
            finished = split_clients(model, carried, slice(following, active)) + finished
        return self.results(finished, totals, gathered)

    def start(self) -> tuple[ModelState, Tensor | None]:
        """Every client's model and what its local step carries, before the first step."""
        clients, sent = self.clients, self.data.sent.model
        if "sent" in self.data.own:
            model = self.data.own["sent"]
        else:
            model = ModelState(*(part.expand(len(clients), -1) for part in sent))
        # Cloned, because layers of a user's own may write to buffers in place.
        model = model._replace(buffers=model.buffers.clone(), integers=model.integers.clone())
        fresh = self.work.local_step.init(self.settings)
        if fresh is None:
            return model, None
        return model, torch.stack([client.setup.state.get(MOMENTUM, fresh) for client in clients])

    def results(
        self,
        finished: Sequence[tuple[ModelState, Tensor | None]],
        totals: Tensor,
        gathered: Sequence[dict[str, Named]],
    ) -> list[ClientResult]:
        """The clients after their last step; `totals`: sums of their objectives over all samples seen, `(clients,)`."""
        losses = (totals / self.lengths.sum(0).clamp(min=1)).tolist()
        return [
            ClientResult(model, carried, client.steps, loss, own)
            for client, (model, carried), loss, own in zip(self.clients, finished, losses, gathered, strict=True)
        ]

    def _own(self) -> dict[str, Any]:
        """What differs between clients throughout; what was sent is in it only where there are several servers."""
        setups = [client.setup for client in self.clients]
        own: dict[str, Any] = {
            "counts": torch.stack([one.context.counts for one in setups]),
            "client": {name: torch.stack([one.state[name] for one in setups]) for name in setups[0].state},
        }
        sent = setups[0].sent
        if any(one.sent is not sent for one in setups):
            own["sent"] = ModelState(*map(torch.stack, zip(*(one.sent.model for one in setups), strict=True)))
            own["broadcast"] = {
                name: torch.stack([one.sent.broadcast[name] for one in setups]) for name in sent.broadcast
            }
        return own

    def _augmentation(self) -> Tensor | None:
        """The keys of augmentation, `(clients, 1)`."""
        if self.work.augment is None:
            return None
        keys = torch.tensor([client.key(Purpose.AUGMENTATION) for client in self.clients])
        return keys.unsqueeze(1).to(self._device)

    def _samples(self, apart: bool) -> tuple[Inputs, Tensor, list[NDArray[np.int64]]]:
        """Inputs and targets that contain all clients' samples, and each one's rows; copies if there are several."""
        samples = [client.setup.samples for client in self.clients]
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
        """Set which client does what in each step."""
        clients, steps = self.clients, self.clients[0].steps
        table = np.zeros((steps, len(clients), self.work.training.batch_size), dtype=np.int64)
        self.sizes = np.zeros((steps, len(clients)), dtype=np.int64)
        for index, (client, own) in enumerate(zip(clients, rows, strict=True)):
            table[: client.steps, index] = client.batches(own)
            self.sizes[: client.steps, index] = client.lengths()
        self.active: list[int] = (self.sizes > 0).sum(1).tolist()
        self.smallest = min(self.sizes[self.sizes > 0].tolist(), default=0)
        self.rows = torch.from_numpy(table).to(self._device)
        self.lengths = torch.from_numpy(self.sizes).to(self._device)
        self.dropout: Tensor | None = None
        if self._step.networks.train.has_dropout:
            keys = torch.tensor([client.key(Purpose.DROPOUT_LAYER) for client in clients])
            self.dropout = mix(0, keys, torch.arange(steps).unsqueeze(1)).to(self._device)

    def _step_inputs(self, number: int) -> StepInputs:
        """One step of the active clients, as wide as the longest batch."""
        active = self.active[number]
        sizes = self.sizes[number, :active]
        width, smallest = int(sizes.max()), int(sizes.min())
        mask = None
        if smallest < width:
            mask = torch.arange(width, device=self._device) < self.lengths[number, :active].unsqueeze(1)
        dropout = None if self.dropout is None else self.dropout[number, :active]
        return StepInputs(number, self.rows[number, :active, :width], mask, smallest, dropout)

    def _first_data(self, clients: int) -> StackData:
        """The data of the first clients."""
        augmentation = None if self.data.augmentation is None else self.data.augmentation[:clients]
        return self.data._replace(own=_first(self.data.own, clients), augmentation=augmentation)


def split_clients(model: ModelState, carried: Tensor | None, which: slice) -> list[tuple[ModelState, Tensor | None]]:
    """The model and carried vector of some clients, one by one; copied if others go on, so that memory is freed."""
    clients = which.stop - which.start
    parts = [
        part[which] if clients == len(part) else part[which].clone() for part in (*model, carried) if part is not None
    ]
    rows = zip(*(part.unbind() for part in parts), strict=True)
    return [(ModelState(*row[:3]), row[3] if len(row) > 3 else None) for row in rows]


def _first(tree: Any, clients: int) -> Any:
    """The first rows of every tensor of a tree."""
    return tree_map(lambda part: None if part is None else part[:clients], tree)
