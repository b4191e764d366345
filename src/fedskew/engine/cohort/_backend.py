"""A whole cohort in lock-step: parameters stacked, one local step of all clients at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from fedskew.engine._backend import Assignment, Backend, Observer, Sent, Update
from fedskew.engine._local_work import LocalWork
from fedskew.engine._sequential import ClientResult, SequentialBackend
from fedskew.engine.cohort._capture import Captures
from fedskew.engine.cohort._layers import MappedNetwork
from fedskew.engine.cohort._rules import stack_size
from fedskew.engine.cohort._stack import Member, Stack
from fedskew.engine.cohort._step import Networks, Step
from fedskew.models import FlatModel


@dataclass
class CohortBackend(Backend):
    """Trains a cohort together, on the device of `model`.

    At most `chunk` clients are stacked at a time (None: as many as `stack_size` says); they are taken in the order of
    their numbers of steps, and leave the stack when they are done. Losses, draws, replies and states are those of
    `SequentialBackend`, to floating-point tolerance. Losses and local steps are mapped over clients by
    `torch.func.vmap`, and
    short batches are padded: they must not branch on values, and a loss must leave out the rows that `Batch.mask` does.
    `capture`: a step is captured as a CUDA graph, where that can be done (`not_captured` says why not); on the CPU the
    same step runs as it is, on the tensors that a graph would have.
    """

    name: ClassVar[str] = "cohort"
    model: FlatModel
    work: LocalWork
    observe: Observer | None = None
    chunk: int | None = None
    capture: bool = False

    def __post_init__(self) -> None:
        self.sequential = SequentialBackend(self.model, self.work, self.observe)
        reads, batch_statistics = self.work.objective.reads, self.work.training.teacher_train_mode
        networks = Networks(
            train=MappedNetwork(self.model, train=True),
            teacher=MappedNetwork(self.model, False, batch_statistics) if "teacher" in reads else None,
            previous=MappedNetwork(self.model, False) if "previous" in reads else None,
        )
        self._step = Step(networks, self.work)
        self._captures = Captures(self._step) if self.capture else None

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        return train_together([Request(self, round, cohort, sent)])[0]

    @cached_property
    def most(self) -> int:
        """How many clients are stacked at a time, at the most."""
        return self.chunk or stack_size(self.model, self.work)

    @property
    def not_captured(self) -> str | None:
        """Why steps are not captured, as far as is known by now; None where they are, or were never to be."""
        return None if self._captures is None else self._captures.refused

    def train_stack(self, members: Sequence[Member]) -> list[ClientResult]:
        """Every step of clients of one kind, given with most steps first."""
        ended = None if self._captures is None else self._captures.train(members)
        return Stack(self._step, members).train() if ended is None else ended

    def end(self, member: Member, ended: ClientResult) -> Update:
        """What a client sends and keeps after its last step."""
        return self.sequential.finish(member.started, ended)


class Request(NamedTuple):
    """One round of one federation."""

    backend: CohortBackend
    round: int
    cohort: Sequence[Assignment]
    sent: Sent


def train_together(requests: Sequence[Request]) -> list[list[Update]]:
    """Rounds of federations that differ in nothing but their data and seed, as one cohort; each one's updates.

    They are stacked as the first one's backend says.
    """
    first = requests[0].backend
    members = [
        Member(request.backend.work, request.backend.sequential.set_up(request.round, task, request.sent))
        for request in requests
        for task in request.cohort
    ]
    alike: defaultdict[Any, list[Member]] = defaultdict(list)
    for member in members:
        alike[member.kind].append(member)
    ended: dict[Member, ClientResult] = {}
    for some in alike.values():
        some.sort(key=lambda member: -member.steps)
        for start in range(0, len(some), first.most):
            chunk = some[start : start + first.most]
            ended |= dict(zip(chunk, first.train_stack(chunk), strict=True))
    own = iter(members)
    return [
        [request.backend.end(member, ended.pop(member)) for member in islice(own, len(request.cohort))]
        for request in requests
    ]
