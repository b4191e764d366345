"""Clients whose parameters are stacked: their batches side by side, and one local step of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedskew.data import Inputs
from fedskew.engine._cohort_layers import MappedNetwork, on_stacks
from fedskew.engine._local_work import LocalWork, training_failed
from fedskew.engine._sequential import MOMENTUM, Ended, Started
from fedskew.hooks import Hooks, Named
from fedskew.models import ModelState, Outputs
from fedskew.objectives import Batch, Context
from fedskew.randomness import Purpose, mix, stream_key


class Networks(NamedTuple):
    """The network as it trains, and as the teacher and a client's previous model look, where a loss reads them."""

    train: MappedNetwork
    teacher: MappedNetwork | None
    previous: MappedNetwork | None


class Member:
    """One client of a stack."""

    def __init__(self, work: LocalWork, started: Started) -> None:
        self.work, self.started = work, started
        self.size, batch = work.training.samples_of_epoch(len(started.samples.rows)), work.training.batch_size
        self._epoch = -(-self.size // batch)  # steps of an epoch
        self.steps = started.task.epochs * self._epoch
        if started.task.steps is not None:
            self.steps = min(self.steps, started.task.steps)

    @property
    def kind(self) -> Any:
        """What must be the same in a stack: the round, and names and shapes of what was kept and sent."""
        named = self.started.kept, self.started.sent.broadcast
        return self.started.round, *(tuple((name, value.shape) for name, value in one.items()) for one in named)

    def batches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of each step's batch, `(steps, batch size)`; a short batch is filled up with rows of the client."""
        task, size = self.started.task, self.work.training.batch_size
        if not self.steps:
            return np.zeros((0, size), dtype=np.int64)
        table = np.empty((-(-self.steps // self._epoch), self._epoch * size), dtype=np.int64)
        orders = self.work.orders(self.started.round, task.client, rows, task.epochs)
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
    """Clients of one kind in training, given with most steps first: the active ones are always the first rows."""

    def __init__(self, networks: Networks, members: Sequence[Member]) -> None:
        self._networks, self._members = networks, members
        self._work = members[0].work
        self._settings, self._sent = members[0].started.settings, members[0].started.sent
        self._device = self._settings.start.device
        self._own = self._constants()
        self._inputs, self._targets, rows = self._data()
        self._schedule(rows)

    def train(self) -> list[Ended]:
        """Every step of every client, in the order of the members."""
        members = self._members
        model, carried = self._begin()
        ended = _left(model, carried, slice(self._active[0] if self._active else 0, len(members)))
        gathering = {name: hooks for name, hooks in self._work.hooks.items() if type(hooks).gather is not Hooks.gather}
        gathered: list[dict[str, Named]] = [{name: {} for name in self._work.hooks} for _ in members]
        totals = torch.zeros(len(members), device=self._device)
        for step, active in enumerate(self._active):
            model, carried = _first((model, carried), active)
            passes = self._passes(step, active, model)
            try:
                parameters, carried = self._step(model.parameters, carried, passes)
            except (RuntimeError, ValueError) as error:
                clients = ", ".join(str(member.started.task.client) for member in members[:active])
                where = f"round {members[0].started.round}, clients {clients}, step {step}"
                raise training_failed(where, error) from error
            model = ModelState(parameters, passes.buffers, passes.integers)
            totals[:active] += passes.values * self._lengths[step, :active]
            for name, hooks in gathering.items():
                for place, member in enumerate(members[:active]):
                    batch = passes.batch_of(place, int(self._sizes[step, place]))
                    gathered[place][name] = hooks.gather(gathered[place][name], batch, member.in_last_epoch(step))
            following = self._active[step + 1] if step + 1 < len(self._active) else 0
            ended = _left(model, carried, slice(following, active)) + ended
        losses = (totals / self._lengths.sum(0).clamp(min=1)).tolist()
        return [
            Ended(model, carried, member.steps, loss, own)
            for member, (model, carried), loss, own in zip(members, ended, losses, gathered, strict=True)
        ]

    def _begin(self) -> tuple[ModelState, Tensor | None]:
        """Every client's model and what its local step carries, before the first step."""
        members, sent = self._members, self._sent.model
        if "sent" in self._own:
            model = self._own["sent"]
        else:
            model = ModelState(*(part.expand(len(members), -1) for part in sent))
        # Cloned, because layers of a user's own may write to buffers in place.
        model = model._replace(buffers=model.buffers.clone(), integers=model.integers.clone())
        fresh = self._work.local_step.init(sent.parameters)
        if fresh is None:
            return model, None
        return model, torch.stack([member.started.kept.get(MOMENTUM, fresh) for member in members])

    def _constants(self) -> dict[str, Any]:
        """What each client has of its own throughout; with one server, what it sent is everybody's and not in it."""
        started = [member.started for member in self._members]
        own: dict[str, Any] = {
            "counts": torch.stack([one.context.counts for one in started]),
            "client": {name: torch.stack([one.kept[name] for one in started]) for name in started[0].kept},
        }
        if any(one.sent is not self._sent for one in started):
            own["sent"] = ModelState(*map(torch.stack, zip(*(one.sent.model for one in started), strict=True)))
            names = self._sent.broadcast
            own["broadcast"] = {name: torch.stack([one.sent.broadcast[name] for one in started]) for name in names}
        return own

    def _data(self) -> tuple[Inputs, Tensor, list[NDArray[np.int64]]]:
        """Inputs and targets that hold all clients' samples, and each one's rows; a copy of those if several."""
        samples = [member.started.samples for member in self._members]
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
        """Who does what in each step: tables of `(steps, clients, ...)`, and the keys of the draws inside steps."""
        members, steps = self._members, self._members[0].steps
        table = np.zeros((steps, len(members), self._work.training.batch_size), dtype=np.int64)
        self._sizes = np.zeros((steps, len(members)), dtype=np.int64)
        for place, (member, own) in enumerate(zip(members, rows, strict=True)):
            table[: member.steps, place] = member.batches(own)
            self._sizes[: member.steps, place] = member.lengths()
        self._active: list[int] = (self._sizes > 0).sum(1).tolist()
        self._table = torch.from_numpy(table).to(self._device)
        self._lengths = torch.from_numpy(self._sizes).to(self._device)
        self._dropout: Tensor | None = None
        self._augmentation: Tensor | None = None
        if self._networks.train.has_dropout:
            keys = torch.tensor([member.key(Purpose.DROPOUT_LAYER) for member in members])
            self._dropout = mix(0, keys, torch.arange(steps).unsqueeze(1)).to(self._device)
        if self._work.augment is not None:
            keys = torch.tensor([member.key(Purpose.AUGMENTATION) for member in members])
            self._augmentation = keys.unsqueeze(1).to(self._device)

    def _passes(self, step: int, active: int, model: ModelState) -> _Passes:
        """The batches of one step, as the first `active` clients see them."""
        sizes = self._sizes[step, :active]
        width = int(sizes.max())
        rows = self._table[step, :active, :width].reshape(-1)
        x = self._inputs.index_select(0, rows)
        if self._work.augment is not None and self._augmentation is not None:
            keys = mix(torch.arange(width, device=self._device), self._augmentation[:active], step)
            x = self._work.augment(x, keys.reshape(-1))
        own = _first(self._own, active)
        own["x"] = x.view(active, width, *x.shape[1:])
        own["y"] = self._targets.index_select(0, rows).view(active, width)
        if sizes.min() < width:
            own["mask"] = torch.arange(width, device=self._device) < self._lengths[step, :active].unsqueeze(1)
        if self._dropout is not None:
            own["key"] = self._dropout[step, :active]
        with torch.no_grad():
            if self._networks.teacher is not None:
                own["teacher"] = self._taught(own, int(sizes.min()))
            if self._networks.previous is not None and "previous.parameters" in own["client"]:
                kept = own["client"]
                network = self._networks.previous
                own["previous"] = vmap(_looks(network))(
                    network.views(kept["previous.parameters"]), kept["previous.buffers"], model.integers, own["x"]
                )
        return _Passes(self._work, self._networks.train, self._sent, own, model, int(sizes.min()))

    def _taught(self, own: dict[str, Any], fewest: int) -> Outputs:
        """The teacher's outputs for each client's rows."""
        network = self._networks.teacher
        assert network is not None, "asked for only where a loss reads it"
        if "sent" not in own and not network.batch_statistics:  # everybody's rows at once
            rows = own["x"].shape[:2]
            parameters, buffers, integers = self._sent.model
            outputs, _, _ = network(network.views(parameters), buffers, integers, own["x"].flatten(0, 1))
            return Outputs(*(part.view(*rows, -1) for part in outputs))
        shared, mask = "sent" not in own, own.get("mask")
        parameters, buffers, integers = self._sent.model if shared else own["sent"]
        places = None if shared else 0

        def look(parameters: Named, buffers: Tensor, integers: Tensor, x: Tensor, real: Tensor | None) -> Outputs:
            return network(parameters, buffers, integers, x, mask=real, fewest=fewest)[0]

        taught: Outputs = vmap(look, in_dims=(places, places, places, 0, None if mask is None else 0))(
            network.views(parameters), buffers, integers, own["x"], mask
        )
        return taught

    @torch.no_grad()
    def _step(self, parameters: Tensor, carried: Tensor | None, passes: _Passes) -> tuple[Tensor, Tensor | None]:
        """One local step of each client."""

        def one(parameters: Tensor, carried: Tensor | None, own: dict[str, Any]) -> tuple[Tensor, ...]:
            settings = self._settings._replace(
                start=own["sent"].parameters if "sent" in own else self._sent.model.parameters,
                broadcast=own.get("broadcast", self._sent.broadcast),
                client=own["client"],
            )
            after, carries = self._work.local_step.step(parameters, passes.gradient, carried, settings)
            return (after,) if carries is None else (after, carries)

        after = vmap(one, in_dims=(0, None if carried is None else 0, 0))(parameters, carried, passes.own)
        return after[0], after[1] if len(after) > 1 else None


class _Passes:
    """Forward and backward passes over one batch of each client, at any parameters.

    `own`: what each client has of its own in this step; `buffers` and `integers`: after the last pass; `values`,
    `(clients,)`: the objectives of the first pass, at the parameters that the step began with.
    """

    values: Tensor

    def __init__(
        self,
        work: LocalWork,
        network: MappedNetwork,
        sent: Any,
        own: dict[str, Any],
        model: ModelState,
        fewest: int,
    ) -> None:
        self._work, self._network, self._sent, self._fewest = work, network, sent, fewest
        self.own, self.buffers, self.integers = own, model.buffers, model.integers
        self._first: Outputs | None = None

    def gradient(self, parameters: Tensor) -> Tensor:
        """One client's gradient, `(parameters,)`, inside a mapped step."""
        return on_stacks(self._gradients, parameters)

    def batch_of(self, place: int, rows: int) -> Batch:
        """A client's batch of so many real rows as the network saw it in the first pass, without gradient."""
        assert self._first is not None, "a step asks for the gradient at least once"
        return Batch(*(part[place, :rows] for part in (*self._first, self.own["y"])))

    def _gradients(self, parameters: Tensor) -> Tensor:
        """Each client's, `(clients, parameters)`: as losses share nothing, their sum's gradient holds them all."""
        views = self._network.views
        with torch.enable_grad():
            # Of each tensor apart: the gradient of a slice of a vector would be a whole vector, mostly zeros.
            leaves = {name: view.detach().requires_grad_() for name, view in views(parameters).items()}
            values, seen, buffers, integers = vmap(self._value)(leaves, self.buffers, self.integers, self.own)
            by_name = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
        gradients = torch.empty_like(parameters)
        for view, gradient in zip(views(gradients).values(), by_name, strict=True):
            view.copy_(gradient)
        self.buffers, self.integers = buffers.detach(), integers
        if self._first is None:
            self.values, self._first = values.detach(), Outputs(*(part.detach() for part in seen))
        return gradients

    def _value(self, parameters: Named, buffers: Tensor, integers: Tensor, own: dict[str, Any]) -> Any:
        """One client's objective, 0-d, what it is of, and the buffers afterwards."""
        mask = own.get("mask")
        outputs, buffers, integers = self._network(
            parameters, buffers, integers, own["x"], own.get("key"), mask, self._fewest
        )
        context = Context(
            own["counts"], own.get("teacher"), own.get("previous"), own.get("broadcast", self._sent.broadcast)
        )
        value = self._work.objective.value(Batch(*outputs, own["y"], mask), context)
        return value, outputs, buffers, integers


def _looks(network: MappedNetwork) -> Any:
    """The outputs of one client's network in eval mode."""
    return lambda parameters, buffers, integers, x: network(parameters, buffers, integers, x)[0]


def _left(model: ModelState, carried: Tensor | None, done: slice) -> list[tuple[ModelState, Tensor | None]]:
    """What each of the clients that are done leaves with; copied where others go on, so as not to hold on to theirs."""
    clients = done.stop - done.start
    parts = [
        part[done] if clients == len(part) else part[done].clone() for part in (*model, carried) if part is not None
    ]
    rows = zip(*(part.unbind() for part in parts), strict=True)
    return [(ModelState(*row[:3]), row[3] if len(row) > 3 else None) for row in rows]


def _first(tree: Any, clients: int) -> Any:
    """The first rows of every tensor of a tree."""
    return tree_map(lambda part: part[:clients], tree)
