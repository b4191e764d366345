"""Trains a cohort on the ranks of `torchrun`, on one machine or several; updates are gathered once a round."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedskew import torchrun
from fedskew.engine._backend import Assignment, Backend, Sent, Update
from fedskew.engine._channel import picklable_error
from fedskew.engine._local_work import LocalWork
from fedskew.errors import ComponentError, RunError

_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another that runs but sends nothing. A rank that has ended is noticed at once."""


@dataclass
class RankBackend(Backend):
    """Trains each rank's part of a cohort, and gathers the updates of all ranks on every rank.

    Every rank plays the same rounds from the same server state, on the model's device. Clients are assigned by
    estimated work, the longest first, each to the rank with the least work so far. Updates are exchanged byte for byte,
    so all ranks continue with the same bits. If `local` trains clients one by one, they are those of `local` alone in
    one process.

    An error inside a client's training is raised on every rank; if another rank has ended, a RunError is raised.

    Attributes:
        local: The backend that trains this rank's clients.
        work: Local training; estimates each client's work.
    """

    name: ClassVar[str] = "ranks"
    local: Backend
    work: LocalWork

    def find_fault(self, round: int, task: Assignment, sent: Sent) -> ComponentError | None:
        """See `Backend.find_fault`; every rank finds the same."""
        return self.local.find_fault(round, task, sent)

    def open(self) -> None:
        """Connect to the other ranks, and open the local backend."""
        meet()
        self.local.open()

    def close(self) -> None:
        """Close the local backend; the connection between ranks ends with the process."""
        self.local.close()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        assigned = torchrun.assign([self.work.expected_samples(task) for task in cohort])
        mine, parameters = assigned[torchrun.rank()], sent.model.parameters
        changes = parameters.new_zeros((max(map(len, assigned)), parameters.numel()))
        own: list[Update] | Exception
        try:
            updates = self.local.train(round, [cohort[place] for place in mine], sent)
            for row, update in zip(changes, updates, strict=False):
                row.copy_(update.change)
            own = [_to("cpu", update._replace(change=parameters.new_zeros(0))) for update in updates]
        except Exception as error:
            own = picklable_error(error)
        gathered: list[Any] = [None] * len(assigned)
        everybodys = [torch.empty_like(changes) for _ in assigned]
        try:
            # The changes, most of the data, as one tensor: gathering objects copies them several times.
            distributed.all_gather_object(gathered, own)
            distributed.all_gather(everybodys, changes)
        except RuntimeError:
            raise _lost(f"round {round}: another rank has ended or can't be reached") from None
        by_place: dict[int, Update] = {}
        for places, part, rows in zip(assigned, gathered, everybodys, strict=True):
            if isinstance(part, Exception):
                raise part
            for place, update, row in zip(places, part, rows, strict=False):
                by_place[place] = _to(parameters.device, update)._replace(change=row)
        return [by_place[place] for place in range(len(cohort))]


def _to(device: torch.device | str, update: Update) -> Update:
    """Copy an update's tensors to a device; a view would be pickled with the whole storage behind it."""
    copied: Update = tree_map_only(Tensor, lambda part: part.to(device, copy=True), update)
    return copied


def meet() -> None:
    """Connect to the other ranks unless connected; the connection ends with the process."""
    if not distributed.is_initialized():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stop)
        links = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(links, timeout=_TIMEOUT)
        atexit.register(distributed.destroy_process_group)


def _stop(number: int, frame: object) -> None:
    """Raise an error at SIGTERM, which torchrun sends when another rank has failed, so that the run ends properly."""
    raise _lost("torchrun has ended this job: another rank has failed, or torchrun itself was stopped")


def _lost(what: str) -> RunError:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one error is enough; torchrun kills ranks that take too long
    return RunError(f"{what}; go on from the last checkpoint with --resume, on any number of ranks")


def from_the_first(value: Any) -> Any:
    """Broadcast the first rank's value to every rank.

    Args:
        value: A value that can be pickled; only the first rank's is used.

    Returns:
        The value that the first rank gave.
    """
    meet()
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]
