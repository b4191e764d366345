"""Stacks of clients: which client takes which step on which rows, and the training of a whole stack."""

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
from fedskew.engine.contracts import calling
from fedskew.hooks import Hooks, Named
from fedskew.models import ModelState
from fedskew.objectives import Batch
from fedskew.randomness import Purpose, mix, stream_key


class StackedClient:
    """One client of a stack: its work, its setup and its number of steps."""

    def __init__(self, work: LocalWork, setup: ClientSetup) -> None:
        self.work, self.setup = work, setup
        self.size = work.training.samples_of_epoch(len(setup.samples.rows))
        self._schedule = work.schedule(setup.task, len(setup.samples.rows))
        self.steps, self._epoch = self._schedule

    @property
    def kind(self) -> Any:
        """A key of the clients that can be stacked: the round, and names and shapes of client state and broadcast."""
        named = self.setup.state, self.setup.sent.broadcast
        return self.setup.round, *(tuple((name, value.shape) for name, value in one.items()) for one in named)

    def batches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of each step's batch, `(steps, batch size)`; the client's rows also pad short batches."""
        task, size = self.setup.task, self.work.training.batch_size
        if not self.steps:
            return np.zeros((0, size), dtype=np.int64)
        table = np.empty((-(-self.steps // self._epoch), self._epoch * size), dtype=np.int64)
        orders = self.work.epoch_orders(self.setup.round, task.client, rows, self._schedule.epochs)
        for epoch, order in zip(table, orders, strict=False):
            epoch[: self.size], epoch[self.size :] = order, order[0]
        return table.reshape(-1, size)[: self.steps]

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of real rows in each step's batch, `(steps,)`."""
        size = self.work.training.batch_size
        epoch = np.full(self._epoch, size, dtype=np.int64)
        epoch[-1:] = self.size - size * (self._epoch - 1)
        return np.resize(epoch, self.steps)

    def in_last_epoch(self, step: int) -> bool:
        """Return whether a step belongs to the client's last local epoch; see `Schedule.in_last_epoch`."""
        return self._schedule.in_last_epoch(step)

    def key(self, purpose: Purpose) -> int:
        """Return the key of the client's random draws inside steps."""
        return stream_key(self.work.seed, purpose, self.setup.round, self.setup.task.client)


class Stack:
    """The data and the schedule of clients of one kind.

    The clients are ordered by falling numbers of steps, so that the active ones always come first.

    Args:
        step: The local step of stacked clients.
        clients: Clients of one kind, in the order of falling numbers of steps.

    Attributes:
        data: Data that stay the same during training.
        active: Number of clients that take each step.
        rows: Rows of each batch, `(steps, clients, batch size)`.
        sizes: Number of real rows of each batch, `(steps, clients)`; 0 once a client has finished.
        lengths: `sizes` as a tensor on the training device.
        dropout: Keys of the dropout layers, `(steps, clients)`; None without dropout.
        smallest: Number of real rows in the smallest batch.
    """

    def __init__(self, step: Step, clients: Sequence[StackedClient]) -> None:
        self.clients, self.settings = clients, clients[0].setup.settings
        self.work, self._step, self._device = step.work, step, self.settings.start.device
        inputs, targets, rows = self._samples()
        self.data = StackData(inputs, targets, clients[0].setup.sent, self._own(), self._augmentation())
        self._schedule(rows)

    def train(self) -> list[ClientResult]:
        """Take all steps of all clients; return the results in the order of the clients."""
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
            except Exception as error:
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
        """Return every client's model and the state of its local step, before the first step."""
        clients, sent = self.clients, self.data.sent.model
        if "sent" in self.data.own:
            model = self.data.own["sent"]
        else:
            model = ModelState(*(part.expand(len(clients), -1) for part in sent))
        # Cloned, because a user's own layers may write to buffers in place.
        model = model._replace(buffers=model.buffers.clone(), integers=model.integers.clone())
        carried = []
        for client in clients:
            with calling("local_step", self.work.local_step, "init", f"round {client.setup.round}: "):
                fresh = self.work.local_step.init(client.setup.settings)
            if fresh is None:
                return model, None
            carried.append(client.setup.state.get(MOMENTUM, fresh))
        return model, torch.stack(carried)

    def results(
        self,
        finished: Sequence[tuple[ModelState, Tensor | None]],
        totals: Tensor,
        gathered: Sequence[dict[str, Named]],
    ) -> list[ClientResult]:
        """Make the results of finished clients; `totals`: sums of their objectives over all samples, `(clients,)`."""
        losses = (totals / self.lengths.sum(0).clamp(min=1)).tolist()
        return [
            ClientResult(model, carried, client.steps, loss, own)
            for client, (model, carried), loss, own in zip(self.clients, finished, losses, gathered, strict=True)
        ]

    def _own(self) -> dict[str, Any]:
        """Stack the data that differ between clients; with several servers also what each sent, and learning rates."""
        setups = [client.setup for client in self.clients]
        own: dict[str, Any] = {
            "counts": torch.stack([one.context.counts for one in setups]),
            "client": {name: torch.stack([one.state[name] for one in setups]) for name in setups[0].state},
        }
        rates = [float(one.settings.lr) for one in setups]
        if len(set(rates)) > 1:
            own["lr"] = torch.tensor(rates, device=self._device)
        sent = setups[0].sent
        if any(one.sent is not sent for one in setups):
            own["sent"] = ModelState(*map(torch.stack, zip(*(one.sent.model for one in setups), strict=True)))
            own["broadcast"] = {
                name: torch.stack([one.sent.broadcast[name] for one in setups]) for name in sent.broadcast
            }
        return own

    def _augmentation(self) -> Tensor | None:
        """Return the keys of augmentation, `(clients, 1)`."""
        if self.work.augment is None:
            return None
        keys = torch.tensor([client.key(Purpose.AUGMENTATION) for client in self.clients])
        return keys.unsqueeze(1).to(self._device)

    def _samples(self) -> tuple[Inputs, Tensor, list[NDArray[np.int64]]]:
        """Return inputs and targets with the samples of all clients, and each client's rows of them.

        They are the data set itself if all clients share one, else copies of the samples.
        """
        samples = [client.setup.samples for client in self.clients]
        inputs, targets, _, _ = samples[0]
        if all(one.inputs is inputs and one.targets is targets for one in samples):
            return inputs, targets, [one.rows for one in samples]
        picked = [(one, torch.from_numpy(one.rows).to(one.targets.device)) for one in samples]
        ends = np.cumsum([len(one.rows) for one in samples])
        return (
            torch.cat([one.inputs.index_select(0, rows) for one, rows in picked]),
            torch.cat([one.targets.index_select(0, rows) for one, rows in picked]),
            [np.arange(end - len(one.rows), end) for one, end in zip(samples, ends, strict=True)],
        )

    def _schedule(self, rows: Sequence[NDArray[np.int64]]) -> None:
        """Set the attributes that say which client trains on which rows in each step."""
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
        """Return the inputs of one step of the active clients, as wide as the longest batch."""
        active = self.active[number]
        sizes = self.sizes[number, :active]
        width, smallest = int(sizes.max()), int(sizes.min())
        mask = None
        if smallest < width:
            mask = torch.arange(width, device=self._device) < self.lengths[number, :active].unsqueeze(1)
        dropout = None if self.dropout is None else self.dropout[number, :active]
        return StepInputs(number, self.rows[number, :active, :width], mask, smallest, dropout)

    def _first_data(self, clients: int) -> StackData:
        """Return the data of the first `clients` clients."""
        augmentation = None if self.data.augmentation is None else self.data.augmentation[:clients]
        return self.data._replace(own=_first(self.data.own, clients), augmentation=augmentation)


def split_clients(model: ModelState, carried: Tensor | None, which: slice) -> list[tuple[ModelState, Tensor | None]]:
    """Split stacked clients into models and carried vectors of single clients.

    They are copied if other clients of the stack go on training, so that the stack's memory can be freed.
    """
    clients = which.stop - which.start
    parts = [
        part[which] if clients == len(part) else part[which].clone() for part in (*model, carried) if part is not None
    ]
    rows = zip(*(part.unbind() for part in parts), strict=True)
    return [(ModelState(*row[:3]), row[3] if len(row) > 3 else None) for row in rows]


def _first(tree: Any, clients: int) -> Any:
    """Return the first `clients` rows of every tensor of a tree."""
    return tree_map(lambda part: None if part is None else part[:clients], tree)
