"""The backend that trains a cohort in lock-step, and the rules that say when that is faster, and how many fit.

A rule reads tensor shapes and the kind of device, never a clock, so that the same config gives the same bits.
"""

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.engine._backend import Assignment, Backend, LocalWork, Observer, Sent, Update
from fedskew.engine._faults import find_fault
from fedskew.engine._records import RoundRecord
from fedskew.engine._sequential import ClientResult, SequentialBackend
from fedskew.engine._states import ServerState
from fedskew.engine.cohort._graphs import Graphs
from fedskew.engine.cohort._layers import MappedNetwork
from fedskew.engine.cohort._stack import Networks, Stack, StackedClient
from fedskew.engine.contracts import is_own
from fedskew.engine.round import Federation
from fedskew.errors import BackendWarning, ComponentError, RunError
from fedskew.models import Concatenated, FlatModel, added_to

CPU_MEMORY = 2**30
GPU_SHARE = 0.5
COPIES = 8  # parameter vectors of a client that exist at a time: sent, start, gradient, carried, a step's results


@dataclass
class CohortBackend(Backend):
    """Trains the clients of a cohort in lock-step, on the device of `model`.

    Clients are stacked in the order of their numbers of steps, and leave the stack when they have finished. Losses,
    draws, replies and states equal those of `SequentialBackend` to floating-point tolerance. Losses and local steps are
    given all clients at once, or mapped by `torch.func.vmap`, so they must not branch on values. Short batches are
    padded, so a loss must ignore the rows at which `Batch.mask` is False.

    Attributes:
        observe: Called with every client's model after its training.
        chunk: Largest number of clients in a stack; None: as many as fit into memory, estimated from tensor shapes.
        not_mapped: Why clients are trained one after another all the same; None if they are not.
        graphs: The graphs of steps; None where there are none, on a CPU.
    """

    name: ClassVar[str] = "cohort"
    model: FlatModel
    work: LocalWork
    observe: Observer | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        self.not_mapped: str | None = None
        self.graphs = Graphs() if self.model.vector.is_cuda else None
        self.sequential = SequentialBackend(self.model, self.work, self.observe)
        if (added := added_to(self.model.module)) is not None:
            _train_alone([self], f"{added}, which can't be mapped over clients")

    @cached_property
    def networks(self) -> Networks:
        """What is computed of stacked clients."""
        reads, batch_statistics = self.work.objective.reads, self.work.training.teacher_train_mode
        return Networks(
            train=MappedNetwork(self.model, train=True),
            teacher=MappedNetwork(self.model, False, batch_statistics) if "teacher" in reads else None,
            previous=MappedNetwork(self.model, False) if "previous" in reads else None,
        )

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        return train_together([CohortRequest(self, round, cohort, sent)])[0]

    def open(self) -> None:
        """See `Backend.open`."""
        self.sequential.open()

    def close(self) -> None:
        """See `Backend.close`."""
        self.sequential.close()

    def ask_losses(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[float]:
        """See `Backend.ask_losses`."""
        return self.sequential.ask_losses(round, cohort, sent)

    def find_fault(self, round: int, task: Assignment, sent: Sent) -> ComponentError | None:
        """See `Backend.find_fault`."""
        return self.sequential.find_fault(round, task, sent)

    @cached_property
    def stack_size(self) -> int:
        """Largest number of clients in a stack."""
        return self.chunk or stack_size(self.model, self.work)

    @cached_property
    def untrained(self) -> list[Tensor]:
        """The values of the network that no round changes: frozen parameters, and buffers outside the model's state."""
        module, kept = self.model.module, self.model.buffer_names
        return [
            *(parameter.detach() for parameter in module.parameters() if not parameter.requires_grad),
            *(buffer for name, buffer in module.named_buffers() if name not in kept),
        ]

    def stacks_with(self, other: "CohortBackend") -> bool:
        """Return whether another backend's clients can be stacked: their training and untrained values are the same."""
        if self is other:
            return True
        if self.work.kind is None or self.work.kind != other.work.kind:
            return False
        return all(torch.equal(one, two) for one, two in zip(self.untrained, other.untrained, strict=True))

    @staticmethod
    def is_faster(model: FlatModel, work: LocalWork, clients: int) -> bool:
        """Estimate from measurements whether a cohort trains faster in lock-step than one client after another.

        On a CPU it does from 8 clients on, if the network has at most 60,000 parameters and no convolutions; on a GPU,
        where it was measured for 62,000 and 1.6 million, from two clients on, if it has at most 2 million. The answer
        is always no if a network, loss, step or hook is not this package's own, since it may not support being mapped.

        In lock-step the start of each operation is shared; but large stacks exceed the cache that one client's
        parameters fit in. docs/performance.md has the measurements.

        Args:
            model: The network, on the device that trains.
        """
        is_ours = not any(map(is_own, (model.module, *work.components))) and not isinstance(model.module, Concatenated)
        if clients < 2 or work.training.precision is not None or not is_ours:
            return False
        parameters = len(model.vector)
        if model.vector.device.type != "cpu":
            return parameters <= 2_000_000
        if any(isinstance(layer, nn.Conv2d) for layer in model.module.modules()):
            return False
        return clients >= 8 and parameters <= 60_000


class CohortRequest(NamedTuple):
    """One round of one federation: the arguments of `Backend.train`, and its backend."""

    backend: CohortBackend
    round: int
    cohort: Sequence[Assignment]
    sent: Sent


def train_together(requests: Sequence[CohortRequest]) -> list[list[Update]]:
    """Train the cohorts of several federations as one cohort, or as few as there are kinds of local training."""
    groups: list[list[int]] = []
    for at, request in enumerate(requests):
        same = (group for group in groups if requests[group[0]].backend.stacks_with(request.backend))
        if (group := next(same, None)) is None:
            groups.append([at])
        else:
            group.append(at)
    trained: dict[int, list[Update]] = {}
    for group in groups:
        trained |= dict(zip(group, _train_group([requests[at] for at in group]), strict=True))
    return [trained[at] for at in range(len(requests))]


def run_round_together(
    federations: Sequence[Federation], states: Sequence[ServerState]
) -> list[tuple[ServerState, RoundRecord]]:
    """Play one round of several federations, whose clients train as one cohort.

    Results are those of each alone, up to rounding. The duration is divided equally among the records. Federations have
    the same network and data set; those whose local training differs otherwise train in cohorts of their own.
    """
    began = time.perf_counter()
    rounds, requests = [], []
    for federation, state in zip(federations, states, strict=True):
        cohort, following = federation.select(state)
        sent, assignments = federation.instruct(following, cohort)
        assert isinstance(federation.backend, CohortBackend), "only a CohortBackend trains several federations together"
        rounds.append((federation, following, cohort, sent))
        requests.append(CohortRequest(federation.backend, following.round, assignments, sent))
    played = []
    for (federation, following, cohort, sent), request, updates in zip(
        rounds, requests, train_together(requests), strict=True
    ):
        collected = federation.codec.add_up(federation, following, cohort, updates)
        fine = set(collected.members.ids.tolist())
        find_fault(federation.backend, following.round, request.cohort, sent, updates, fine)
        following, outcome = federation.move(following, cohort, sent, collected)
        played.append((following, federation.record(following.round, cohort, outcome)))
    for _, record in played:
        record.seconds = (time.perf_counter() - began) / len(played)
    return played


def _train_group(requests: Sequence[CohortRequest]) -> list[list[Update]]:
    """Train the cohorts of federations that can be stacked; one client after another where they can't be mapped."""
    first = requests[0].backend
    if first.not_mapped is None:
        try:
            with warnings.catch_warnings():
                # Operations that PyTorch maps one client at a time are slow, not wrong.
                warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
                return _train_mapped(requests)
        except RunError as error:
            why = _why_not_mapped(error)
            if why is None:
                raise
        _train_alone([request.backend for request in requests], why)
    return [request.backend.sequential.train(request.round, request.cohort, request.sent) for request in requests]


def _train_alone(backends: Sequence[CohortBackend], why: str) -> None:
    """Let backends train one client after another from now on, and say why."""
    for backend in backends:
        backend.not_mapped = why
    said = f"engine.backend: clients are trained one after another, not as one cohort: {why}"
    warnings.warn(said, BackendWarning, stacklevel=3)


def _why_not_mapped(error: RunError) -> str | None:
    """Why a step can't be mapped, if that is what an error is about."""
    said = str(error.__cause__)
    operation = re.search(r"atching rule not implemented for (\S+?)[;.\s]", said + " ")
    if operation is not None:
        return f"PyTorch can't map {operation[1].removeprefix('aten::')} over clients"
    if "data-dependent control flow" in said or ".item()" in said:
        return "a Python branch on values can't be mapped over clients"
    return " ".join(said.split()) if "vmap" in said else None


def _train_mapped(requests: Sequence[CohortRequest]) -> list[list[Update]]:
    """Train the cohorts of several federations as one, in stacks."""
    first = requests[0].backend
    clients = [
        StackedClient(request.backend.work, request.backend.sequential.set_up(request.round, task, request.sent))
        for request in requests
        for task in request.cohort
    ]
    by_kind: defaultdict[Any, list[StackedClient]] = defaultdict(list)
    for client in clients:
        by_kind[client.kind].append(client)
    results: dict[StackedClient, ClientResult] = {}
    for alike in by_kind.values():
        alike.sort(key=lambda client: -client.steps)
        for start in range(0, len(alike), first.stack_size):
            stacked = alike[start : start + first.stack_size]
            stack = Stack(first.networks, first.work, stacked)
            held = None if first.graphs is None else first.graphs.hold(stack)
            results |= dict(zip(stacked, stack.train(held), strict=True))
    remaining, trained = iter(clients), list[list[Update]]()
    for request in requests:
        model, own = request.sent.model.parameters, islice(remaining, len(request.cohort))
        rows = model.new_empty(len(request.cohort), model.numel()).unbind()  # one matrix, to be added up as it is
        finish = request.backend.sequential.finish
        trained.append([finish(one.setup, results.pop(one), row) for one, row in zip(own, rows, strict=True)])
    return trained


def stack_size(model: FlatModel, work: LocalWork) -> int:
    """Compute how many clients fit into a stack, from the memory that one client's step takes."""
    device = model.vector.device
    budget = CPU_MEMORY if device.type == "cpu" else GPU_SHARE * torch.cuda.get_device_properties(device).total_memory
    own, saved = model.vector.untyped_storage().data_ptr(), 0

    def count(tensor: Any) -> Any:
        nonlocal saved
        if tensor.untyped_storage().data_ptr() != own:  # not the parameters, which are counted below
            saved += tensor.numel() * tensor.element_size()
        return tensor

    inputs = work.data.of(0).inputs
    x = inputs.index_select(0, torch.arange(min(1, len(inputs)), device=device))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model.module.eval()(x)
    copies = COPIES + (work.training.adam is not None)
    each = 2 * work.training.batch_size * saved + copies * model.vector.numel() * model.vector.element_size()
    return max(1, int(budget / each))
