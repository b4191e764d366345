"""Trains a cohort in several processes of this machine; results equal the sequential backend's bit for bit."""

from __future__ import annotations

import pickle
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew.children import Child, Died, Pool, Reply
from fedskew.engine._backend import Assignment, Backend, Observer, Sent, Update
from fedskew.engine._channel import Channel, MessageBuffer, SharedBuffer, picklable_error, share
from fedskew.engine._local_work import LocalWork
from fedskew.engine._sequential import SequentialBackend
from fedskew.engine._update_buffer import UpdateBuffer
from fedskew.errors import ArgumentError, ComponentError, RunError
from fedskew.models import FlatModel


@dataclass
class ProcessBackend(Backend):
    """Trains a cohort in several processes, each of which trains one client after another.

    Clients are handed out by estimated work, the longest first, each to the next free process. The processes start with
    `open` or with the first round; each computes with as many threads as this process has at that time, and keeps the
    frozen parts of the model as they are in its first round. The data are moved into shared memory. CPU only.

    An error inside a client's training is raised in this process too; if a process is killed, a RunError is raised.
    After either, and after an interrupt, all processes are ended.

    Attributes:
        model: The network, on the CPU; picklable.
        work: Local training; picklable.
        processes: Number of processes.
        observe: Called with every client's model after its training; picklable.

    Raises:
        ArgumentError: There is less than one process, the model is not on the CPU, or the system is Windows, which
            can't share memory by file descriptors.
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
            raise ArgumentError(f"processes: they train on the CPU only; the model is on {self.model.vector.device}")
        if sys.platform == "win32":
            raise ArgumentError("processes: they need Linux or macOS; use the backend 'sequential' on Windows")
        self._pool = Pool(partial(_Trainer, (self.model, self.work, self.observe)), self.processes)
        weakref.finalize(self, self._pool.kill)
        self._data: list[SharedBuffer] | None = None
        self._sent = MessageBuffer()
        self._shared_rows: SharedBuffer | None = None
        self._rows = UpdateBuffer(self._allocate)

    def find_fault(self, round: int, task: Assignment, sent: Sent) -> ComponentError | None:
        """See `Backend.find_fault`."""
        return SequentialBackend(self.model, self.work).find_fault(round, task, sent)

    def open(self) -> None:
        """Start the processes if they are not running. They need some seconds; the call returns at once."""
        self._pool.open()
        if self._data is None:
            with _picklable():
                self._data = share((self.work, self.observe))

    def close(self) -> None:
        """End the processes."""
        self._pool.kill()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        try:
            self.open()
            return self._train(round, cohort, self._sent.copy_in(sent))
        except BaseException:  # some processes may still be training
            self.close()
            raise

    def _train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        places = sorted(range(len(cohort)), key=lambda place: -self.work.expected_samples(cohort[place]))
        rows = self._rows.acquire(len(cohort), sent.model.parameters.numel())
        jobs = [(None if rows is None else rows[place], round, cohort[place], sent) for place in places]
        updates: dict[int, Update] = {}
        for number, reply in self._pool.run(jobs):
            place = places[number]
            if isinstance(reply.value, Died):
                where = f"round {round}, client {cohort[place].client}"
                raise RunError(f"{where}: the process that trained it ended early ({reply.value})")
            update, error, trace = reply.value
            if error is not None:
                raise error from _RemoteError(trace)
            updates[place] = update if rows is None else update._replace(change=rows[place])
        return [updates[place] for place in range(len(cohort))]

    def _allocate(self, values: int) -> NDArray[np.float32]:
        """Allocate shared memory to which the processes write the clients' changes."""
        self._shared_rows = SharedBuffer(4 * values)
        self._shared_rows.register()
        return self._shared_rows.memory.numpy().view(np.float32)


class _Trainer(Child):
    """A child process that trains clients; its first job carries the arguments of its `SequentialBackend`."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__(_train_clients, torch.get_num_threads(), daemon=True)
        self._channel = Channel(self.connection)
        self._arguments: tuple[Any, ...] | None = arguments

    def send(self, job: Any) -> None:
        with _picklable():
            self._channel.send((self._arguments, *job))
        self._arguments = None

    def receive(self) -> Reply:
        reply: Reply = self._channel.receive()
        return reply


class _RemoteError(Exception):
    """An error in another process, as the text of its traceback."""

    def __str__(self) -> str:
        return f"in another process:\n{self.args[0]}"


def _train_clients(connection: Connection, threads: int) -> None:
    """Train each client that is received, and reply with an update, or with an error and its traceback."""
    torch.set_num_threads(threads)
    channel = Channel(connection)
    backend: SequentialBackend | None = None
    while True:
        result: tuple[Update | None, Exception | None, str]
        try:
            try:
                arguments, row, round, task, sent = channel.receive()
            except (AttributeError, ImportError) as error:
                raise _not_importable(error) from error
            if arguments is not None:
                backend = SequentialBackend(*arguments)
            assert backend is not None, "the arguments come with the first job"
            (update,) = backend.train_into(None if row is None else row.unsqueeze(0), round, [task], sent)
            if row is not None:  # the change is in shared memory already
                update = update._replace(change=row[:0])
            result = update, None, ""
        except EOFError:
            return
        except Exception as error:
            result = None, picklable_error(error), traceback.format_exc()
        channel.send(Reply(result))


def _not_importable(error: Exception) -> RunError:
    """Return the error of a child that can't import a class which the parent has, as those of a notebook."""
    said = " ".join(str(error).split())
    return RunError(
        f"engine.backend: other processes can't import what this run uses ({said}); put classes "
        "of a notebook into a file and import them, or set engine.backend to 'sequential' or 'cohort'"
    )


@contextmanager
def _picklable() -> Iterator[None]:
    """Turn pickling errors into a RunError of one line."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RunError(
            f"engine.backend: this run can't be sent to other processes ({error}); define your own classes and "
            "functions at the top level of a module, or use the backend 'sequential'"
        ) from error
