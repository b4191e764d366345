"""A cohort in several processes of this machine: the same bits as one client after another, whatever their number."""

from __future__ import annotations

import pickle
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.children import Child
from fedskew.engine._backend import Assignment, Backend, Observer, Sent, Update
from fedskew.engine._channel import Block, Channel, Desk, sendable, share
from fedskew.engine._local_work import LocalWork
from fedskew.engine._sequential import SequentialBackend
from fedskew.engine._update_buffer import UpdateBuffer
from fedskew.errors import ArgumentError, RunError
from fedskew.models import FlatModel


@dataclass
class ProcessBackend(Backend):
    """Trains a cohort in `processes` processes, each of which trains one client after another.

    The longest client is dealt out first, the next to whoever is free. The processes start with `open`, or with the
    first round; each computes with as many threads as this one does then, and keeps what is not trained of the model as
    it is in its first round. The data are moved into shared memory; what comes back is this process's own. CPU only;
    `model`, `work` and `observe` must be picklable.

    An error inside a client's training is raised here as it is there; where a process is killed, a RunError. After
    either, and after an interrupt, all of them are ended.
    """

    name: ClassVar[str] = "processes"
    model: FlatModel
    work: LocalWork
    processes: int
    observe: Observer | None = None

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ArgumentError(f"processes: must be at least 1, not {self.processes}")
        if self.model.vector.device.type != "cpu":
            raise ArgumentError(f"processes: train on the CPU, and the model is on {self.model.vector.device}")
        if sys.platform == "win32":
            raise ArgumentError("processes: they need Linux or macOS; train one client after another here")
        self._workers: list[_Worker] = []
        self._data: list[Block] = []
        self._desk = Desk()
        self._changes: Block | None = None
        self._rows = UpdateBuffer(self._shared)

    def open(self) -> None:
        """Start the processes if they don't run; they are ready some seconds later."""
        if self._workers:
            return
        parts = self.model, self.work, self.observe
        self._workers = [_Worker(parts) for _ in range(self.processes)]
        weakref.finalize(self, _end, self._workers)
        with _picklable():
            self._data = share(parts[1:])

    def close(self) -> None:
        """End the processes."""
        _end(self._workers)
        self._workers = []

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        try:
            self.open()
            return self._train(round, cohort, self._desk.lay_out(sent))
        except BaseException:  # some are in the midst of something
            self.close()
            raise

    def _train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        waiting = deque(sorted(range(len(cohort)), key=lambda place: -self.work.expected_samples(cohort[place])))
        rows = self._rows.acquire(len(cohort), sent.model.parameters.numel())
        idle, busy = list(self._workers), dict[Any, tuple[_Worker, int]]()  # by connection
        updates: dict[int, Update] = {}
        while len(updates) < len(cohort):
            while idle and waiting:
                worker, place = idle.pop(), waiting.popleft()
                worker.begin(None if rows is None else rows[place], round, cohort[place], sent)
                busy[worker.child.connection] = worker, place
            for connection in wait(list(busy)):
                worker, place = busy.pop(connection)
                updates[place] = worker.finish(f"round {round}, client {cohort[place].client}")
                idle.append(worker)
        return [updates[place] for place in range(len(cohort))]

    def _shared(self, values: int) -> NDArray[np.float32]:
        """Memory in which the processes write what they have trained."""
        self._changes = Block(4 * values)
        self._changes.publish()
        return self._changes.memory.numpy().view(np.float32)


class _Worker:
    """A process, as seen from the one that started it; it is sent `parts` with its first client."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.child = Child(_work, torch.get_num_threads(), daemon=True)
        self._channel = Channel(self.child.connection)
        self._parts: tuple[Any, ...] | None = parts
        self._row: Tensor | None = None

    def begin(self, row: Tensor | None, round: int, task: Assignment, sent: Sent) -> None:
        """Have one client trained; its change is written to `row`, if there is one."""
        self._row = row
        try:
            with _picklable():
                self._channel.send((self._parts, row, round, task, sent))
        except ConnectionError:
            return  # it has died: `finish` will say so
        self._parts = None

    def finish(self, what: str) -> Update:
        try:
            update, error, trace = self._channel.receive()
        except (EOFError, ConnectionError):
            how = self.child.how_it_ended()
            raise RunError(f"{what}: the process that trained it ended early ({how})") from None
        if error is not None:
            raise error from _RemoteError(trace)
        trained: Update = update
        row, self._row = self._row, None
        return trained if row is None else trained._replace(change=row)


class _RemoteError(Exception):
    """An error in another process, as the text of its traceback."""

    def __str__(self) -> str:
        return f"in another process:\n{self.args[0]}"


def _work(connection: Connection, threads: int) -> None:
    """What a process does: train one client after another until nobody asks any more."""
    torch.set_num_threads(threads)
    channel = Channel(connection)
    backend: SequentialBackend | None = None
    while True:
        answer: tuple[Update | None, Exception | None, str]
        try:
            parts, row, round, task, sent = channel.receive()
            if parts is not None:
                backend = SequentialBackend(*parts)
            assert backend is not None, "the first message brings what it is made of"
            (update,) = backend.train_into(None if row is None else row.unsqueeze(0), round, [task], sent)
            if row is not None:  # the change is there already, where the other side sees it
                update = update._replace(change=row[:0])
            answer = update, None, ""
        except EOFError:
            return
        except Exception as error:
            answer = None, sendable(error), traceback.format_exc()
        channel.send(answer)


@contextmanager
def _picklable() -> Iterator[None]:
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RunError(
            f"engine.backend: this run can't be sent to other processes ({error}); define what is your own at the top "
            "level of a module, or use the backend 'sequential'"
        ) from error


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.child.kill()
