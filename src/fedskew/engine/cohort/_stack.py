"""Stacks of clients: which client takes which step on which rows, and the steps of all of them at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedskew.components import seen_by
from fedskew.data import Inputs
from fedskew.engine._backend import LocalWork, flush_denormals, require_gradient, training_failed
from fedskew.engine._sequential import ClientResult, ClientSetup, carried_first
from fedskew.engine.cohort._layers import LinearChain, MappedNetwork, on_stacks
from fedskew.engine.contracts import calling, checked_figure, checked_step
from fedskew.hooks import Hooks, Named
from fedskew.local_steps import StepSettings, corrected, steps_in_place, takes_rows
from fedskew.models import ModelState, Outputs
from fedskew.objectives import Batch, Context, Objective
from fedskew.randomness import Purpose, mix, stream_key


class Networks(NamedTuple):
    """The network to train; the teacher and the client's previous model, each None unless a loss reads it."""

    train: MappedNetwork
    teacher: MappedNetwork | None
    previous: MappedNetwork | None


class StackedClient:
    """One client of a stack: its work, its setup and its number of steps."""

    def __init__(self, work: LocalWork, setup: ClientSetup) -> None:
        self.work, self.setup = work, setup
        self.size = work.training.samples_of_epoch(len(setup.samples.rows))
        self.schedule = work.schedule(setup.task, len(setup.samples.rows))
        self.steps = self.schedule.steps

    @property
    def kind(self) -> Any:
        """A key of the clients that can be stacked: the round, and names and shapes of client state and broadcast."""
        named = self.setup.state, self.setup.sent.broadcast
        return self.setup.round, *(tuple((name, value.shape) for name, value in one.items()) for one in named)

    def batches(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of each step's batch, `(steps, batch size)`; the client's rows also pad short batches."""
        task, size, schedule = self.setup.task, self.work.training.batch_size, self.schedule
        if not self.steps:
            return np.zeros((0, size), dtype=np.int64)
        table = np.empty((schedule.epochs, schedule.of_epoch * size), dtype=np.int64)
        orders = self.work.epoch_orders(self.setup.round, task.client, self.setup.samples, rows, schedule.epochs)
        for epoch, order in zip(table, orders, strict=False):
            epoch[: self.size], epoch[self.size :] = order, order[0]
        return table.reshape(-1, size)[: self.steps]

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of real rows in each step's batch, `(steps,)`."""
        size, of_epoch = self.work.training.batch_size, self.schedule.of_epoch
        lengths = np.full(self.steps, size, dtype=np.int64)
        lengths[of_epoch - 1 :: max(of_epoch, 1)] = self.size - size * (of_epoch - 1)
        return lengths

    def key(self, purpose: Purpose) -> int:
        """Return the key of the client's random draws inside steps."""
        return stream_key(self.work.seed, purpose, self.setup.round, self.setup.task.client)


class Own(NamedTuple):
    """What a step reads beside the parameters: stacked, `(clients, ...)`, or shared by all (None in `Stack.dims`)."""

    sent: ModelState
    broadcast: Named
    lr: float | Tensor
    counts: Tensor
    client: Named
    x: Any = None
    y: Any = None
    mask: Tensor | None = None
    key: Tensor | None = None
    teacher: Outputs | None = None
    previous: Outputs | None = None


class Moment(NamedTuple):
    """What differs between the steps of a stack.

    Attributes:
        number: The step's number.
        rows: Rows of each client's batch, `(clients, batch)`.
        lengths: How many of each client's rows are real; None: all.
        smallest: The real rows of the smallest batch.
        key: Of each client's draws in dropout layers, if the network has any.
    """

    number: int | Tensor
    rows: Tensor
    lengths: Tensor | None
    smallest: int
    key: Tensor | None


class StackLog:
    """Figures that the `active` clients of a stack log, all in one call; see `ClientLog`."""

    def __init__(self, clients: int) -> None:
        self.active = self._clients = clients
        self._sums: dict[str, Tensor] = {}

    def __call__(self, name: str, value: Any) -> None:
        on_stacks(partial(self._add, name), checked_figure(name, value))

    def _add(self, name: str, figures: Tensor) -> Tensor:
        sums = self._sums.setdefault(name, figures.new_zeros(2, self._clients))
        sums[:, : self.active] += torch.stack([figures, torch.ones_like(figures)])
        return figures

    def __bool__(self) -> bool:
        """Whether anything was logged."""
        return bool(self._sums)

    def means(self, client: int) -> dict[str, float]:
        """Return the means of one client, by name."""
        found = {name: sums[:, client].tolist() for name, sums in self._sums.items()}
        return {name: total / times for name, (total, times) in found.items() if times}


class Stack:
    """Clients of one kind, those with most steps first; `sizes` are the real rows of each batch, `(steps, clients)`."""

    def __init__(self, networks: Networks, work: LocalWork, clients: Sequence[StackedClient]) -> None:
        self.networks, self.work, self.clients, step = networks, work, clients, work.local_step
        self._in_place = steps_in_place(step, rows=True)
        self._takes_rows = takes_rows(step)
        setups = [client.setup for client in clients]
        self._device = setups[0].settings.start.device
        self.own, self.dims = _own(setups)
        self.inputs, self._targets, rows = _samples(setups)
        steps = clients[0].steps
        table = np.zeros((steps, len(clients), work.training.batch_size), dtype=np.int64)
        self.sizes = np.zeros((steps, len(clients)), dtype=np.int64)
        for index, (client, own_rows) in enumerate(zip(clients, rows, strict=True)):
            table[: client.steps, index] = client.batches(own_rows)
            self.sizes[: client.steps, index] = client.lengths()
        self.active: list[int] = (self.sizes > 0).sum(1).tolist()
        self._widths = self.sizes.max(1, initial=0).tolist()
        self._smallest = self.sizes.min(1, initial=work.training.batch_size, where=self.sizes > 0).tolist()
        self._rows = torch.from_numpy(table).to(self._device)
        self._lengths = torch.from_numpy(self.sizes).to(self._device)
        self._dropout = self._augmentation = None
        if networks.train.keys:
            keys = torch.tensor([client.key(Purpose.DROPOUT_LAYER) for client in clients])
            self._dropout = mix(0, keys, torch.arange(steps).unsqueeze(1)).to(self._device)
        if work.augment is not None:
            keys = torch.tensor([client.key(Purpose.AUGMENTATION) for client in clients])
            self._augmentation = keys.unsqueeze(1).to(self._device)

    @flush_denormals()
    def train(self, held: Any = None) -> list[ClientResult]:
        """Take all steps of all clients, those that are `held` as graphs; return the results in the clients' order."""
        clients, work = self.clients, self.work
        gathering = {name: hooks for name, hooks in work.hooks.items() if type(hooks).gather is not Hooks.gather}
        totals, self.log = torch.zeros(len(clients), device=self._device), StackLog(len(clients))
        (model, carried), reads = self.start() if held is None else held.start, self.reads(len(clients))
        lengths = self._lengths.to(totals.dtype)
        finished = _split(model, carried, slice(self.active[0] if self.active else 0, len(clients)), held is not None)
        gathered: list[dict[str, Named]] = [{name: {} for name in work.hooks} for _ in clients]
        for number, active in enumerate(self.active):
            if held is None and active < len(model.parameters):
                model, carried = tree_map(partial(of_first, active), (model, carried))
                reads = self.reads(active)
            try:
                if held is None:
                    objective, model, carried = self.step(self.moment(number, active), reads, model, carried)
                    values = objective.values
                else:
                    values = held.step(self, number, active)
            except Exception as error:
                names = ", ".join(str(client.setup.task.client) for client in clients[:active])
                where = f"round {clients[0].setup.round}, clients {names}, step {number}"
                raise training_failed(where, error) from error
            totals[:active].add_(values * lengths[number, :active])
            for name, hooks in gathering.items():
                for index, client in enumerate(clients[:active]):
                    batch = Batch(*(part[index, : int(self.sizes[number, index])] for part in objective.batch[:3]))
                    last = client.schedule.in_last_epoch(number)
                    gathered[index][name] = hooks.gather(gathered[index][name], batch, last)
            following = self.active[number + 1] if number + 1 < len(self.active) else 0
            if following < active:
                finished = _split(model, carried, slice(following, active), held is not None) + finished
        losses = (totals / self._lengths.sum(0).clamp(min=1)).tolist()
        return [
            ClientResult(model, carried, client.steps, loss, own, self.log.means(at))
            for at, (client, (model, carried), loss, own) in enumerate(
                zip(clients, finished, losses, gathered, strict=True)
            )
        ]

    def start(self) -> tuple[ModelState, Named]:
        """Return every client's model, and what its first step is given as carried."""
        model, clients = self.own.sent, len(self.clients)
        if self.dims.sent is None:
            model = ModelState(*(part.expand(clients, -1) for part in model))
        model = ModelState(*(part.clone(memory_format=torch.contiguous_format) for part in model))  # to be written to
        fresh = [carried_first(self.work, client.setup) for client in self.clients]
        return model, {name: torch.stack([one[name] for one in fresh]) for name in fresh[0]}

    def moment(self, number: int, active: int, padded: bool = False) -> Moment:
        """Return what a step of the `active` first clients differs in; `padded`: batches have their whole width."""
        smallest, width = self._smallest[number], self._rows.shape[2] if padded else self._widths[number]
        lengths = self._lengths[number, :active] if padded or smallest < width else None
        key = None if self._dropout is None else self._dropout[number, :active]
        return Moment(number, self._rows[number, :active, :width], lengths, smallest, key)

    def reads(self, active: int) -> tuple[Own, StepSettings]:
        """Return what the `active` first clients read in every step, without batches, and the settings of the step."""
        parts: Any = zip(self.own[:5], self.dims[:5], strict=True)
        own = Own(*(part if dim is None else tree_map(partial(of_first, active), part) for part, dim in parts))
        settings = self.clients[0].setup.settings._replace(
            start=own.sent.parameters,
            lr=own.lr.unsqueeze(1) if isinstance(own.lr, Tensor) and own.lr.dim() else own.lr,
            broadcast=own.broadcast if self.dims.broadcast is None else _beside_vectors(own.broadcast),
            client=_beside_vectors(own.client),
        )
        with calling("local_step", self.work.local_step, "correction", f"round {self.clients[0].setup.round}: "):
            return own, corrected(self.work.local_step, settings) if self._takes_rows else settings

    @torch.no_grad()
    def step(
        self, moment: Moment, reads: tuple[Own, StepSettings], model: ModelState, carried: Named
    ) -> "tuple[_StackObjective, ModelState, Named]":
        """Take one step of the active clients. Operations depend on shapes only: it never waits for the device."""
        (own, dims), settings = self._batches(moment, reads[0], model), reads[1]
        self.log.active, step = len(moment.rows), self.work.local_step
        objective = _StackObjective(self, own, dims, moment.smallest, model)

        seen = seen_by(step.step, {"layout": self.networks.train.layout, "log": self.log})
        if self._in_place is not None and dims.lr is None:
            self._in_place.step_in_place(model.parameters, objective.gradients, carried, settings)
            parameters = model.parameters
        elif self._takes_rows and "log" not in seen:
            stepped = step.step(model.parameters, objective.gradients, carried, settings, **seen)
            parameters, carried = checked_step(step, stepped, model.parameters)
        else:

            def one(parameters: Tensor, carried: Named, own: Own) -> tuple[Tensor, Named]:
                mine = settings._replace(
                    start=own.sent.parameters, lr=own.lr, broadcast=own.broadcast, client=own.client
                )
                return checked_step(step, step.step(parameters, objective.gradient, carried, mine, **seen), parameters)

            parameters, carried = vmap(one, in_dims=(0, 0 if carried else None, dims))(model.parameters, carried, own)
        require_gradient(step, objective)
        return objective, ModelState(parameters, objective.buffers, objective.integers), carried

    def _batches(self, moment: Moment, own: Own, model: ModelState) -> tuple[Own, Any]:
        """Add the batches to what the active clients read, and return also what of it is stacked."""
        (active, width), rows = moment.rows.shape, moment.rows.reshape(-1)
        x, mask = self.inputs.index_select(0, rows), None
        if self.work.augment is not None and self._augmentation is not None:
            keys = mix(torch.arange(width, device=x.device), self._augmentation[:active], moment.number)
            x = self.work.augment(x, keys.reshape(-1))
        if moment.lengths is not None:
            mask = torch.arange(width, device=self._device) < moment.lengths.unsqueeze(1)
        own = own._replace(
            x=x.view(active, width, *x.shape[1:]),
            y=self._targets.index_select(0, rows).view(active, width),
            mask=mask,
            key=moment.key,
        )
        dim, smallest = self.dims.sent, moment.smallest
        if self.networks.teacher is not None:
            own = own._replace(teacher=self._infer(self.networks.teacher, own, own.sent, dim, smallest))
        if self.networks.previous is not None and "previous.parameters" in own.client:
            kept = ModelState(own.client["previous.parameters"], own.client["previous.buffers"], model.integers)
            own = own._replace(previous=self._infer(self.networks.previous, own, kept, 0, smallest))
        return own, Own(*self.dims[:5], *(None if part is None else 0 for part in own[5:]))

    def _infer(self, network: MappedNetwork, own: Own, model: ModelState, dim: Any, smallest: int) -> Outputs:
        """Compute the outputs of a model, or of one of each client if `dim` is 0, on each client's batch."""
        parameters, buffers, integers = model
        chain = network.chain(own.x[0])
        if dim is None and (chain or not network.batch_statistics):  # one pass over the rows of all clients
            if chain is not None:
                outputs = chain.outputs(network.views(parameters[None]), own.x.flatten(2).flatten(0, 1)[None])
            else:
                outputs, _, _ = network(network.views(parameters), buffers, integers, own.x.flatten(0, 1))
            return Outputs(*(part.view(*own.x.shape[:2], -1) for part in outputs))
        if chain is not None:
            return chain.outputs(network.views(parameters), own.x.flatten(2))

        def infer(parameters: Named, buffers: Tensor, integers: Tensor, x: Tensor, mask: Tensor | None) -> Outputs:
            return network(parameters, buffers, integers, x, mask=mask, smallest=smallest)[0]

        return vmap(infer, in_dims=(dim, dim, dim, 0, None if own.mask is None else 0))(
            network.views(parameters), buffers, integers, own.x, own.mask
        )


class _StackObjective:
    """The objective on one batch of each client, and its gradient, at any parameters."""

    # `buffers` and `integers` are the networks' buffers after the last evaluation; `values` and `batch` are the
    # objectives, and features, logits and targets, at the parameters with which the step began.

    values: Tensor
    batch: Batch

    def __init__(self, stack: Stack, own: Own, dims: Any, smallest: int, model: ModelState) -> None:
        self._work, self._network, self._smallest, self._log = stack.work, stack.networks.train, smallest, stack.log
        self._own, self._dims, self.buffers, self.integers = own, dims, model.buffers, model.integers
        self._together = own._replace(counts=own.counts.unsqueeze(1))  # for losses that take all clients at once
        self.is_evaluated = False

    def gradient(self, parameters: Tensor, part: str | int | None = None) -> Tensor:
        """Compute one client's gradient, `(parameters,)`; called inside a mapped step."""
        return on_stacks(partial(self.gradients, part=part), parameters)

    def gradients(self, parameters: Tensor, part: str | int | None = None) -> Tensor:
        """Compute each client's gradient, `(clients, parameters)`."""
        views, objective = self._network.views, self._work.objective.part(part)
        if (chain := self._network.chain(self._own.x[0])) is not None:
            return self._gradients_of_chain(chain, parameters, objective)
        with torch.enable_grad():
            # Each tensor is a leaf of its own: the gradient of a slice of a vector would be a full vector of zeros.
            leaves = {name: view.detach().requires_grad_() for name, view in views(parameters).items()}
            outputs, buffers, integers = vmap(self._outputs, in_dims=(0, 0, 0, self._dims))(
                leaves, self.buffers, self.integers, self._own
            )
            values = self._values(objective, outputs)
            by_name = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
        gradients = torch.empty_like(parameters)
        for view, gradient in zip(views(gradients).values(), by_name, strict=True):
            view.copy_(gradient)
        self.buffers, self.integers = buffers.detach(), integers
        self._note(values, Outputs(*(seen.detach() for seen in outputs)), objective)
        return gradients

    def _note(self, values: Tensor, outputs: Outputs, objective: Objective) -> None:
        """Note the objectives, whole also where a part was asked for, and the batch, if the step begins here."""
        if self.is_evaluated:
            return
        if objective is not self._work.objective:
            values = self._values(self._work.objective, outputs)
        self.values, self.is_evaluated, self.batch = values.detach(), True, Batch(*outputs, self._own.y)

    def _values(self, objective: Objective, outputs: Outputs) -> Tensor:
        """Compute each client's objective, `(clients,)`, of the outputs, which it does not write to."""
        if objective.takes_stacks:
            return self._valued(objective, *outputs, self._together)
        return vmap(partial(self._valued, objective), in_dims=(0, 0, self._dims))(*outputs, self._own)

    def _valued(self, objective: Objective, features: Tensor, logits: Tensor, own: Own) -> Tensor:
        return objective.value(Batch(features.clone(), logits.clone(), own.y, own.mask), self._context(own))

    def _context(self, own: Own) -> Context:
        return Context(own.counts, own.teacher, own.previous, own.broadcast, self._log)

    def _gradients_of_chain(self, chain: LinearChain, parameters: Tensor, objective: Objective) -> Tensor:
        own, views = self._own, self._network.views(parameters)
        outputs = chain.outputs(views, own.x.flatten(2))
        if objective.is_sloped:
            batch = Batch(*outputs, own.y, own.mask)
            values, by_logits, by_features = objective.slope(batch, self._context(self._together))
        else:
            with torch.enable_grad():
                leaves = Outputs(*(part.detach().requires_grad_() for part in outputs))
                values = self._values(objective, leaves)
                by_features, by_logits = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        gradients = torch.empty_like(parameters)
        by_logits = torch.zeros_like(outputs.logits) if by_logits is None else by_logits
        chain.backward(views, self._network.views(gradients), by_features, by_logits)
        self._note(values, outputs, objective)
        return gradients

    def _outputs(self, parameters: Named, buffers: Tensor, integers: Tensor, own: Own) -> Any:
        """Compute the outputs of one client's network, and its buffers afterwards."""
        return self._network(parameters, buffers, integers, own.x, own.key, own.mask, self._smallest)


def _beside_vectors(named: Named) -> Named:
    """Return stacked tensors as they go with one vector for each client: of a number for each, a column."""
    return {name: one.unsqueeze(1) if one.dim() == 1 else one for name, one in named.items()}


def _own(setups: Sequence[ClientSetup]) -> tuple[Own, Any]:
    """Return what steps read without batches, and what of it is stacked (0) or the same for all (None)."""
    first, rates = setups[0], [float(one.settings.lr) for one in setups]
    several, uneven = any(one.sent is not first.sent for one in setups), len(set(rates)) > 1
    sent, broadcast = first.sent
    if several:
        sent = ModelState(*map(torch.stack, zip(*(one.sent.model for one in setups), strict=True)))
        broadcast = {name: torch.stack([one.sent.broadcast[name] for one in setups]) for name in broadcast}
    own = Own(
        sent=sent,
        broadcast=broadcast,
        lr=torch.tensor(rates, device=sent.parameters.device) if uneven else first.settings.lr,
        counts=torch.stack([one.context.counts for one in setups]),
        client={name: torch.stack([one.state[name] for one in setups]) for name in first.state},
    )
    dim: Any = 0 if several else None
    rate: Any = 0 if uneven else None
    return own, Own(dim, dim, rate, 0, 0)  # type: ignore[arg-type]


def _samples(setups: Sequence[ClientSetup]) -> tuple[Inputs, Tensor, list[NDArray[np.int64]]]:
    """Return inputs and targets with the samples of all clients, and each client's rows of them."""
    samples = [setup.samples for setup in setups]
    inputs, targets, *_ = samples[0]
    if all(one.inputs is inputs and one.targets is targets for one in samples):
        return inputs, targets, [one.rows for one in samples]
    picked = [(one, torch.from_numpy(one.rows).to(one.targets.device)) for one in samples]
    ends = np.cumsum([len(one.rows) for one in samples])
    return (
        torch.cat([one.inputs.index_select(0, rows) for one, rows in picked]),
        torch.cat([one.targets.index_select(0, rows) for one, rows in picked]),
        [np.arange(end - len(one.rows), end) for one, end in zip(samples, ends, strict=True)],
    )


def _split(model: ModelState, carried: Named, which: slice, copied: bool) -> list[tuple[ModelState, Named]]:
    """Split stacked clients into models and carried tensors of single clients; `copied`: the stack is written to."""
    copied = copied or which.stop - which.start < len(model.parameters)
    parts = [part[which].clone() if copied else part[which] for part in (*model, *carried.values())]
    rows = zip(*(part.unbind() for part in parts), strict=True)
    return [(ModelState(*row[:3]), dict(zip(carried, row[3:], strict=True))) for row in rows]


def of_first(clients: int, part: Any) -> Any:
    """Return what is of the first clients of a stack."""
    return part[:clients] if isinstance(part, Tensor) and part.dim() else part
