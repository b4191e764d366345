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
from fedskew.engine.contracts import checked_step
from fedskew.hooks import Named
from fedskew.local_steps import StepSettings
from fedskew.models import ModelState, Outputs
from fedskew.objectives import Batch, Context
from fedskew.randomness import mix


class Networks(NamedTuple):
    """The network to train; the teacher and the client's previous model, each None unless a loss reads it."""

    train: MappedNetwork
    teacher: MappedNetwork | None
    previous: MappedNetwork | None


class StackData(NamedTuple):
    """Data of stacked clients that stay the same during their training.

    Attributes:
        inputs: Inputs that contain the samples of all clients.
        targets: Class ids of `inputs`.
        sent: What the server sent; with several servers (federations trained together), what the first one sent.
        own: Data that differ between clients, `(clients, ...)`: label counts and states; with several servers also what
            each client was sent, and the learning rate where they have different ones.
        augmentation: Keys of the augmentation's draws, `(clients, 1)`; None without augmentation.
    """

    inputs: Inputs
    targets: Tensor
    sent: Sent
    own: dict[str, Any]
    augmentation: Tensor | None


class StepInputs(NamedTuple):
    """Inputs of one step of stacked clients.

    Attributes:
        number: Number of the step, from 0.
        rows: Rows of each client's batch, `(clients, width)`.
        mask: True at real rows, `(clients, width)`; None: all rows are real.
        smallest: Number of real rows in the smallest batch.
        dropout: Keys of the dropout layers, `(clients,)`; None without dropout.
    """

    number: int
    rows: Tensor
    mask: Tensor | None
    smallest: int
    dropout: Tensor | None


class StepResult(NamedTuple):
    """The result of one step of stacked clients.

    Attributes:
        model: The clients' models, `(clients, ...)`.
        carried: States of the local steps, such as momentum buffers, `(clients, ...)`; None: they have none.
        values: Objectives at the parameters with which the step began, `(clients,)`.
        batch: Features, logits and targets at these parameters, `(clients, width, ...)`.
    """

    model: ModelState
    carried: Tensor | None
    values: Tensor
    batch: Batch


@dataclass(frozen=True)
class Step:
    """A local step of stacked clients, whose operations depend on shapes only: it never waits for the device."""

    networks: Networks
    work: LocalWork

    @torch.no_grad()
    def take(
        self,
        data: StackData,
        step_inputs: StepInputs,
        settings: StepSettings,
        model: ModelState,
        carried: Tensor | None,
    ) -> StepResult:
        """Take one step of every client, without writing to an argument.

        Args:
            data: Data that stay the same during training, with what was sent and what clients kept.
            step_inputs: Inputs of this step.
            settings: Gives the learning rate (unless clients have their own), momentum and weight decay; its other
                fields are not read.
            model: The clients' models, `(clients, ...)`.
            carried: States of the local steps, `(clients, ...)`; None: they have none.

        Returns:
            The clients' models and states after the step, and the objectives and batches before it.
        """
        own = self._own(data, step_inputs, model)
        objective = _StackObjective(self, data.sent, own, step_inputs.smallest, model)

        def one(parameters: Tensor, carried: Tensor | None, own: dict[str, Any]) -> tuple[Tensor, ...]:
            mine = settings._replace(
                start=own["sent"].parameters if "sent" in own else data.sent.model.parameters,
                lr=own.get("lr", settings.lr),
                broadcast=own.get("broadcast", data.sent.broadcast),
                client=own["client"],
            )
            stepped = self.work.local_step.step(parameters, objective.gradient, carried, mine)
            after, carries = checked_step(self.work.local_step, stepped, parameters)
            return (after,) if carries is None else (after, carries)

        after = vmap(one, in_dims=(0, None if carried is None else 0, 0))(model.parameters, carried, own)
        following = ModelState(after[0], objective.buffers, objective.integers)
        return StepResult(following, after[1] if len(after) > 1 else None, objective.values, objective.batch)

    def _own(self, data: StackData, step_inputs: StepInputs, model: ModelState) -> dict[str, Any]:
        """Collect what differs between clients in this step: `data.own`, batches, and other models' outputs on them."""
        clients, width = step_inputs.rows.shape
        rows = step_inputs.rows.reshape(-1)
        x = data.inputs.index_select(0, rows)
        if self.work.augment is not None and data.augmentation is not None:
            keys = mix(torch.arange(width, device=x.device), data.augmentation, step_inputs.number)
            x = self.work.augment(x, keys.reshape(-1))
        own = dict(data.own)
        own["x"] = x.view(clients, width, *x.shape[1:])
        own["y"] = data.targets.index_select(0, rows).view(clients, width)
        if step_inputs.mask is not None:
            own["mask"] = step_inputs.mask
        if step_inputs.dropout is not None:
            own["key"] = step_inputs.dropout
        if self.networks.teacher is not None:
            own["teacher"] = self._teach(self.networks.teacher, data.sent, own, step_inputs.smallest)
        if self.networks.previous is not None and "previous.parameters" in own["client"]:
            kept, network = own["client"], self.networks.previous
            own["previous"] = vmap(lambda *arguments: network(*arguments)[0])(
                network.views(kept["previous.parameters"]), kept["previous.buffers"], model.integers, own["x"]
            )
        return own

    def _teach(self, network: MappedNetwork, sent: Sent, own: dict[str, Any], smallest: int) -> Outputs:
        """Compute the teacher's outputs on each client's batch."""
        if "sent" not in own and not network.batch_statistics:  # one pass over the rows of all clients
            rows = own["x"].shape[:2]
            parameters, buffers, integers = sent.model
            outputs, _, _ = network(network.views(parameters), buffers, integers, own["x"].flatten(0, 1))
            return Outputs(*(part.view(*rows, -1) for part in outputs))
        shared, mask = "sent" not in own, own.get("mask")
        parameters, buffers, integers = sent.model if shared else own["sent"]
        dim = None if shared else 0

        def teach(parameters: Named, buffers: Tensor, integers: Tensor, x: Tensor, mask: Tensor | None) -> Outputs:
            return network(parameters, buffers, integers, x, mask=mask, smallest=smallest)[0]

        taught: Outputs = vmap(teach, in_dims=(dim, dim, dim, 0, None if mask is None else 0))(
            network.views(parameters), buffers, integers, own["x"], mask
        )
        return taught


class _StackObjective:
    """The objective on one batch of each client, and its gradient, at any parameters.

    `buffers` and `integers` are the networks' buffers after the last evaluation; `values` and `batch` are as in
    `StepResult`.
    """

    values: Tensor
    batch: Batch

    def __init__(self, step: Step, sent: Sent, own: dict[str, Any], smallest: int, model: ModelState) -> None:
        self._work, self._network, self._sent, self._smallest = step.work, step.networks.train, sent, smallest
        self._own, self.buffers, self.integers = own, model.buffers, model.integers
        self._evaluated = False

    def gradient(self, parameters: Tensor) -> Tensor:
        """Compute one client's gradient, `(parameters,)`; called inside a mapped step."""
        return on_stacks(self._gradients, parameters)

    def _gradients(self, parameters: Tensor) -> Tensor:
        """Compute each client's gradient, `(clients, parameters)`.

        As clients share no parameters, it is the gradient of the sum of their objectives.
        """
        views = self._network.views
        with torch.enable_grad():
            # Each tensor is a leaf of its own: the gradient of a slice of a vector would be a full vector of zeros.
            leaves = {name: view.detach().requires_grad_() for name, view in views(parameters).items()}
            values, seen, buffers, integers = vmap(self._value)(leaves, self.buffers, self.integers, self._own)
            by_name = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
        gradients = torch.empty_like(parameters)
        for view, gradient in zip(views(gradients).values(), by_name, strict=True):
            view.copy_(gradient)
        self.buffers, self.integers = buffers.detach(), integers
        if not self._evaluated:
            self.values, self._evaluated = values.detach(), True
            self.batch = Batch(seen.features.detach(), seen.logits.detach(), self._own["y"])
        return gradients

    def _value(self, parameters: Named, buffers: Tensor, integers: Tensor, own: dict[str, Any]) -> Any:
        """Compute one client's objective, 0-d, the network's outputs, and its buffers afterwards."""
        mask = own.get("mask")
        outputs, buffers, integers = self._network(
            parameters, buffers, integers, own["x"], own.get("key"), mask, self._smallest
        )
        context = Context(
            own["counts"], own.get("teacher"), own.get("previous"), own.get("broadcast", self._sent.broadcast)
        )
        value = self._work.objective.value(Batch(*outputs, own["y"], mask), context)
        return value, outputs, buffers, integers
