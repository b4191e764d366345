"""A cohort over the ranks of `torchrun`, on one machine or several: one all-reduce a round."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as distributed
from torch import Tensor

from fedskew import torchrun
from fedskew.engine._backend import Assignment, Backend, Sent, Update
from fedskew.engine._channel import pack, sendable, unpack
from fedskew.engine._local_work import LocalWork
from fedskew.errors import RunError

_PATIENCE = timedelta(hours=1)
"""How long a rank waits for one that lives and says nothing; one that has died is missed at once."""


@dataclass
class RankBackend(Backend):
    """Trains its rank's part of a cohort by `local`, and has the updates of all ranks.

    Every rank plays the same rounds from the same server state, on the device of the model. Clients are dealt out by
    estimated work, the longest first, each to the rank that has least. What a client returns, its state too, is packed
    byte for byte into a row of a table of int32 zeros, so that one sum over ranks (nccl between GPUs, gloo elsewhere)
    gives every rank the same bits; those of `local` on one rank, where that trains clients apart. The table is summed
    again, wider, in a round whose rows have outgrown it.

    An error inside a client's training is raised on every rank. Raises RunError where another rank has died.
    """

    name: ClassVar[str] = "ranks"
    local: Backend
    work: LocalWork

    def __post_init__(self) -> None:
        self._width = 0  # of the table, in words

    def open(self) -> None:
        """Meet the other ranks."""
        meet()
        self.local.open()

    def close(self) -> None:
        """Close the local backend; the ranks part when the process ends."""
        self.local.close()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        mine = deal([self.work.expected_samples(task) for task in cohort], torchrun.ranks())[torchrun.rank()]
        device = sent.model.parameters.device
        rows: dict[int, Any] = {}
        try:
            updates = self.local.train(round, [cohort[place] for place in mine], sent)
            rows = {place: _on("cpu", update) for place, update in zip(mine, updates, strict=True)}
        except Exception as error:
            rows = dict.fromkeys(mine, sendable(error))
        self._width = max(self._width, sum(part.nbytes for part in sent.model) // 4 + 4096)
        everybodys = self._exchange(round, {place: pack(row) for place, row in rows.items()}, len(cohort), device)
        for row in everybodys:
            if isinstance(row, Exception):
                raise row
        return [_on(device, row) for row in everybodys]

    def _exchange(self, round: int, rows: Mapping[int, Tensor], cohort: int, device: torch.device) -> Iterable[Any]:
        """What every client of the cohort has returned, from the rows, int32, of this rank's."""
        while True:
            table = torch.zeros(cohort, 1 + self._width, dtype=torch.int32)
            for place, row in rows.items():
                table[place, 0] = len(row)
                if len(row) <= self._width:
                    table[place, 1 : 1 + len(row)] = row
            table = table.to(device)
            try:
                distributed.all_reduce(table)
            except RuntimeError:
                raise _lost(f"round {round}: another rank has ended or can't be reached") from None
            table = table.cpu()
            longest = int(table[:, 0].max()) if cohort else 0
            if longest <= self._width:
                return [unpack(row[1 : 1 + row[0]]) for row in table]
            self._width = longest + longest // 4


def meet() -> None:
    """Meet the other ranks, once; they part when the process ends."""
    if not distributed.is_initialized():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stop)
        links = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(links, timeout=_PATIENCE)
        atexit.register(distributed.destroy_process_group)


def _stop(number: int, frame: object) -> None:
    """Torchrun ends the other ranks by SIGTERM when one has failed: time enough to say so, and for a checkpoint."""
    raise _lost("torchrun has ended this job: another rank has failed, or it was told to stop")


def _lost(what: str) -> RunError:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one such error is enough; torchrun kills what takes too long
    return RunError(f"{what}; go on from the last checkpoint with --resume, on any number of ranks")


def from_the_first(value: Any) -> Any:
    """What the first rank gives, plain values, on every rank."""
    meet()
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


def deal(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Numbers of the clients of each rank: the longest first, each to the rank, the lowest of several, with least."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(work)), key=lambda place: -work[place]):
        least = loads.index(min(loads))
        dealt[least].append(place)
        loads[least] += work[place]
    return dealt


def _on(device: torch.device | str, update: Update) -> Update:
    """An update whose tensors are on a device."""
    return update._replace(
        change=update.change.to(device),
        norm=update.norm.to(device),
        buffers=update.buffers.to(device),
        integers=update.integers.to(device),
        reply={name: value.to(device) for name, value in update.reply.items()},
        state={name: value.to(device) for name, value in update.state.items()},
    )
