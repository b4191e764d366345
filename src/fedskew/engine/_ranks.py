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
        mine = assign([self.work.expected_samples(task) for task in cohort], torchrun.ranks())[torchrun.rank()]
        own: dict[int, Update] | Exception
        try:
            updates = self.local.train(round, [cohort[place] for place in mine], sent)
            # Copies, as a view is pickled with all of the memory that it is a view of.
            own = tree_map_only(Tensor, lambda part: part.to("cpu", copy=True), dict(zip(mine, updates, strict=True)))
        except Exception as error:
            own = picklable_error(error)
        gathered: list[Any] = [None] * torchrun.ranks()
        try:
            distributed.all_gather_object(gathered, own)
        except RuntimeError:
            raise _lost(f"round {round}: another rank has ended or can't be reached") from None
        for part in gathered:
            if isinstance(part, Exception):
                raise part
        everybody: dict[int, Update] = {place: update for part in gathered for place, update in part.items()}
        device = sent.model.parameters.device
        return [tree_map_only(Tensor, lambda part: part.to(device), everybody[place]) for place in range(len(cohort))]


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


def assign(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of the clients of each rank: the longest first, each to the rank, the lowest of several, with least."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        least = loads.index(min(loads))
        assigned[least].append(place)
        loads[least] += work[place]
    return assigned
