"""A cohort over the ranks of `torchrun`, on one machine or several; the updates are gathered once a round."""

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
from fedskew.errors import RunError

_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for one that lives and sends nothing; one that has died is noticed at once."""


@dataclass
class RankBackend(Backend):
    """Trains each rank's part of a cohort, and gathers the updates of all ranks on every rank.

    Every rank plays the same rounds from the same server state, on the device of the model. Clients are assigned by
    estimated work, the longest first, each to the rank that has least so far. Updates travel byte for byte, so every
    rank continues with the same bits: those of `local` in one process, where that trains clients one by one.

    An error inside a client's training is raised on every rank; a RunError where another rank has died.

    Attributes:
        local: The backend that trains this rank's clients.
        work: Local training, by which clients are assigned.
    """

    name: ClassVar[str] = "ranks"
    local: Backend
    work: LocalWork

    def open(self) -> None:
        """Meet the other ranks."""
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
            # The changes, which are most of it, as one tensor: objects are copied several times on their way.
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
    """An update with copies of its tensors: a view would be pickled with all of the memory that it is a view of."""
    copied: Update = tree_map_only(Tensor, lambda part: part.to(device, copy=True), update)
    return copied


def meet() -> None:
    """Connect to the other ranks, once; the connection ends with the process."""
    if not distributed.is_initialized():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stop)
        links = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(links, timeout=_TIMEOUT)
        atexit.register(distributed.destroy_process_group)


def _stop(number: int, frame: object) -> None:
    """Torchrun ends the other ranks by SIGTERM when one has failed: time enough to say so, and for a checkpoint."""
    raise _lost("torchrun has ended this job: another rank has failed, or it was told to stop")


def _lost(what: str) -> RunError:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one such error is enough; torchrun kills what takes too long
    return RunError(f"{what}; go on from the last checkpoint with --resume, on any number of ranks")


def from_the_first(value: Any) -> Any:
    """The first rank's value on every rank.

    Args:
        value: A value that can be pickled; only the first rank's is used.

    Returns:
        The value that the first rank gave.
    """
    meet()
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]
