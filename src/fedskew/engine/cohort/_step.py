"""One local step of stacked clients: their batches side by side, forward and backward passes, the next parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedskew.data import Inputs
from fedskew.engine._backend import Sent
from fedskew.engine._local_work import LocalWork
from fedskew.engine.cohort._layers import MappedNetwork, on_stacks
from fedskew.hooks import Named
from fedskew.local_steps import StepSettings
from fedskew.models import ModelState, Outputs
from fedskew.objectives import Batch, Context
from fedskew.randomness import mix


class Networks(NamedTuple):
    """The network as it trains, and as the teacher and a client's previous model look, where a loss reads them."""

    train: MappedNetwork
    teacher: MappedNetwork | None
    previous: MappedNetwork | None


class Held(NamedTuple):
    """What stacked clients have throughout their training.

    `inputs`, `targets`: hold all their samples; `sent`: what the server sent, the first one's where there are several;
    `own`: what each client has of its own, `(clients, ...)`: its label counts, what it kept, and what it was sent where
    there are several servers; `augmentation`: the keys of its draws, `(clients, 1)`, None where nothing is augmented.
    """

    inputs: Inputs
    targets: Tensor
    sent: Sent
    own: dict[str, Any]
    augmentation: Tensor | None


class StepInputs(NamedTuple):
    """What stacked clients do in one step.

    `number`: the step, from 0; `rows`: of each client's batch, `(clients, width)`; `mask`: which of them are real, the
    same shape, None where all are; `fewest`: how many of them a client has at least; `dropout`: the keys of the dropout
    layers, `(clients,)`, None where there are none.
    """

    number: int | Tensor
    rows: Tensor
    mask: Tensor | None
    fewest: int
    dropout: Tensor | None


class Taken(NamedTuple):
    """A step taken: the models, what local steps carry on, and what the first forward pass gave.

    `values`: the objectives, `(clients,)`; `batch`: features, logits and targets, `(clients, width, ...)`.
    """

    model: ModelState
    carried: Tensor | None
    values: Tensor
    batch: Batch


@dataclass(frozen=True)
class Step:
    """How stacked clients take a local step; the same operations, whatever the tensors hold."""

    networks: Networks
    work: LocalWork

    @torch.no_grad()
    def take(
        self, held: Held, step_inputs: StepInputs, settings: StepSettings, model: ModelState, carried: Tensor | None
    ) -> Taken:
        """One step of every client; no argument is written to.

        `settings`: learning rate, momentum and weight decay; what was sent and kept is in `held`.
        """
        passes = _Passes(self, held.sent, self._seen(held, step_inputs, model), step_inputs.fewest, model)

        def one(parameters: Tensor, carried: Tensor | None, own: dict[str, Any]) -> tuple[Tensor, ...]:
            mine = settings._replace(
                start=own["sent"].parameters if "sent" in own else held.sent.model.parameters,
                broadcast=own.get("broadcast", held.sent.broadcast),
                client=own["client"],
            )
            after, carries = self.work.local_step.step(parameters, passes.gradient, carried, mine)
            return (after,) if carries is None else (after, carries)

        after = vmap(one, in_dims=(0, None if carried is None else 0, 0))(model.parameters, carried, passes.own)
        following = ModelState(after[0], passes.buffers, passes.integers)
        return Taken(following, after[1] if len(after) > 1 else None, passes.values, passes.batch)

    def _seen(self, held: Held, step_inputs: StepInputs, model: ModelState) -> dict[str, Any]:
        """What each client has of its own in this step: that of `held`, its batch, and how other models see it."""
        clients, width = step_inputs.rows.shape
        rows = step_inputs.rows.reshape(-1)
        x = held.inputs.index_select(0, rows)
        if self.work.augment is not None and held.augmentation is not None:
            keys = mix(torch.arange(width, device=x.device), held.augmentation, step_inputs.number)
            x = self.work.augment(x, keys.reshape(-1))
        own = dict(held.own)
        own["x"] = x.view(clients, width, *x.shape[1:])
        own["y"] = held.targets.index_select(0, rows).view(clients, width)
        if step_inputs.mask is not None:
            own["mask"] = step_inputs.mask
        if step_inputs.dropout is not None:
            own["key"] = step_inputs.dropout
        if self.networks.teacher is not None:
            own["teacher"] = self._taught(self.networks.teacher, held.sent, own, step_inputs.fewest)
        if self.networks.previous is not None and "previous.parameters" in own["client"]:
            kept, network = own["client"], self.networks.previous
            own["previous"] = vmap(_looks(network))(
                network.views(kept["previous.parameters"]), kept["previous.buffers"], model.integers, own["x"]
            )
        return own

    def _taught(self, network: MappedNetwork, sent: Sent, own: dict[str, Any], fewest: int) -> Outputs:
        """The teacher's outputs for each client's rows."""
        if "sent" not in own and not network.batch_statistics:  # everybody's rows at once
            rows = own["x"].shape[:2]
            parameters, buffers, integers = sent.model
            outputs, _, _ = network(network.views(parameters), buffers, integers, own["x"].flatten(0, 1))
            return Outputs(*(part.view(*rows, -1) for part in outputs))
        shared, mask = "sent" not in own, own.get("mask")
        parameters, buffers, integers = sent.model if shared else own["sent"]
        places = None if shared else 0

        def look(parameters: Named, buffers: Tensor, integers: Tensor, x: Tensor, real: Tensor | None) -> Outputs:
            return network(parameters, buffers, integers, x, mask=real, fewest=fewest)[0]

        taught: Outputs = vmap(look, in_dims=(places, places, places, 0, None if mask is None else 0))(
            network.views(parameters), buffers, integers, own["x"], mask
        )
        return taught


class _Passes:
    """Forward and backward passes over one batch of each client, at any parameters.

    `own`: what each client has of its own in this step; `buffers` and `integers`: after the last pass; `values`,
    `(clients,)`, and `batch`: of the first pass, at the parameters that the step began with, without gradient.
    """

    values: Tensor
    batch: Batch

    def __init__(self, step: Step, sent: Sent, own: dict[str, Any], fewest: int, model: ModelState) -> None:
        self._work, self._network, self._sent, self._fewest = step.work, step.networks.train, sent, fewest
        self.own, self.buffers, self.integers = own, model.buffers, model.integers
        self._first = True

    def gradient(self, parameters: Tensor) -> Tensor:
        """One client's gradient, `(parameters,)`, inside a mapped step."""
        return on_stacks(self._gradients, parameters)

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
        if self._first:
            self.values, self._first = values.detach(), False
            self.batch = Batch(seen.features.detach(), seen.logits.detach(), self.own["y"])
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
