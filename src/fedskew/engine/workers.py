"""Trains a cohort in several processes of this machine, or on the ranks of `torchrun`, with the bits of one process.

In processes, the data, what is sent and the updates lie in memory that all share (`torch.multiprocessing`); each writes
the changes of its clients' parameters into rows of one matrix.
"""

import atexit
import io
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from heapq import heapify, heappop, heappush
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed
import torch.multiprocessing  # from now on, tensors that are sent to a process lie in shared memory
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedskew import torchrun
from fedskew.children import Child, Died, Pool, Reply
from fedskew.data import Inputs
from fedskew.engine._backend import Assignment, Backend, LocalWork, Observer, Sent, Update, reuse_freed_memory
from fedskew.engine._records import BATCH, Predictions, batches, predict_batch, predicted
from fedskew.engine._sequential import SequentialBackend
from fedskew.errors import ArgumentError, ComponentError, RunError
from fedskew.models import FlatModel, ModelState

AT_ONCE = 4
"""Updates for each process that there is room for, where each is added up as it comes."""


@dataclass
class ProcessBackend(Backend):
    """Trains a cohort in several processes, each of which trains one client after another.

    Clients are handed out by estimated work, the longest first of those that there is room for, each to the next free
    process. Each process computes with as many threads as this one has at its start, and keeps the frozen parts of the
    model as they are in its first round. CPU only. After an error, a killed process or an interrupt, all are ended.

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
        self._pool = Pool(partial(_Trainer, self.model, (self.work, self.observe)), self.processes)
        weakref.finalize(self, self._pool.kill)

    def ask_losses(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[float]:
        """See `Backend.ask_losses`."""
        return SequentialBackend(self.model, self.work).ask_losses(round, cohort, sent)

    def find_fault(self, round: int, task: Assignment, sent: Sent) -> ComponentError | None:
        """See `Backend.find_fault`."""
        return SequentialBackend(self.model, self.work).find_fault(round, task, sent)

    def open(self) -> None:
        """Start the processes if they are not running. They need some seconds; the call returns at once."""
        reuse_freed_memory(True)
        self._pool.open()

    def close(self) -> None:
        """End the processes."""
        reuse_freed_memory(False)
        self._pool.kill()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        return list(self._train(round, cohort, sent, len(cohort)))

    def train_each(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> Iterator[Update]:
        """See `Backend.train_each`; as many at a time as keep the processes busy."""
        return self._train(round, cohort, sent, AT_ONCE * self.processes)

    def _train(self, round: int, cohort: Sequence[Assignment], sent: Sent, at_once: int) -> Iterator[Update]:
        order = [(-self.work.expected_samples(task), place) for place, task in enumerate(cohort)]
        free, updates, done = order[:at_once], dict[int, Update](), 0
        heapify(free)  # those whose row of `changes` is free

        def following() -> tuple[int, _Training] | None:
            if not free:
                return None
            _, place = heappop(free)
            return place, _Training(changes[place % at_once], round, cohort[place], sent)

        def read(place: int, reply: Reply) -> Update:
            who = f"round {round}, client {cohort[place].client}: the process that trained it"
            update = _mapped(np.ndarray, _as_tensor, _checked(reply.value, who))
            return update._replace(change=changes[place % at_once])

        try:
            self.open()
            with _sendable():
                changes = torch.empty(min(at_once, len(cohort)), sent.model.parameters.numel()).share_memory_()
            for place, update in self._pool.run(following, read):
                updates[place] = update
                while done in updates:
                    yield updates.pop(done)
                    if done + at_once < len(order):
                        heappush(free, order[done + at_once])
                    done += 1
        except BaseException:  # some processes may still be training
            self.close()
            raise

    def predict(self, model: ModelState, inputs: Inputs, targets: Tensor, num_classes: int) -> Predictions | None:
        """See `Backend.predict`; while the processes are busy, or start, this one helps."""
        if not isinstance(inputs, Tensor) or len(targets) <= BATCH:
            return None
        with _sendable():
            inputs.share_memory_()
            targets.share_memory_()
        here = SequentialBackend(self.model, self.work)
        jobs = enumerate([_Prediction(model, x, y, num_classes) for x, y in batches(inputs, targets)])

        def read(_: int, reply: Reply) -> Any:
            return _checked(reply.value, "evaluation: the process that did it")

        try:
            self.open()
            parts = dict(self._pool.run(lambda: next(jobs, None), read, lambda job: (job.run(here), None, "")))
        except BaseException:
            self.close()
            raise
        return predicted(parts[number] for number in sorted(parts))


class _Training(NamedTuple):
    """The job to train a client, and to write the change of its parameters into shared memory."""

    row: Tensor
    round: int
    task: Assignment
    sent: Sent

    def run(self, backend: SequentialBackend) -> Update:
        task = self.task._replace(state={name: _as_tensor(part) for name, part in self.task.state.items()})
        (update,) = backend.train_each(self.round, [task], self.sent, self.row.unsqueeze(0))
        return _mapped(Tensor, Tensor.numpy, update._replace(change=self.row[:0]))  # the change is there already


class _Prediction(NamedTuple):
    """The job to predict a part of a data set."""

    model: ModelState
    x: Tensor
    y: Tensor
    classes: int

    def run(self, backend: SequentialBackend) -> Predictions:
        backend.model.write_state(self.model)
        return predict_batch(backend.model.network, self.x, self.y, self.classes)


_Result = tuple[Any, Exception | None, str]
"""What a job gave, or an error and its traceback."""


def _checked(result: _Result | Died, who: str) -> Any:
    """Return what a job gave; raise its error, or one that says that the process `who` ended early."""
    if isinstance(result, Died):
        raise RunError(f"{who} ended early ({result})")
    value, error, trace = result
    if error is not None:
        raise error from RuntimeError(f"in another process:\n{trace}")
    return value


class _Trainer(Child):
    """A child process that works on jobs; its first carries the model, which is its own, and the work."""

    def __init__(self, model: FlatModel, arguments: tuple[Any, ...]) -> None:
        super().__init__(_work, torch.get_num_threads(), daemon=True)
        packed = io.BytesIO()
        with _sendable():
            torch.save(model, packed)  # a pickle would have the vector of all parameters once for each that views it
        self._first: tuple[Any, ...] | None = (packed.getvalue(), *arguments)

    def send(self, job: Any) -> None:
        if isinstance(job, _Training):
            # Tensors that a client keeps are copied: there may be more of them than a process may have files.
            state: Any = {name: part.numpy() for name, part in job.task.state.items()}
            job = job._replace(task=job.task._replace(state=state))
        with _sendable():
            super().send((self._first, job))
        self._first = None


def _work(connection: Connection, threads: int) -> None:
    """Work on each job that is received, and reply with a result."""
    torch.set_num_threads(threads)
    backend: SequentialBackend | None = None
    while True:
        result: _Result
        try:
            try:
                first, job = connection.recv()
                model: Any = None if first is None else torch.load(io.BytesIO(first[0]), weights_only=False)
            except (AttributeError, ImportError) as error:
                raise _not_importable(error) from error
            if first is not None:
                backend = SequentialBackend(model, *first[1:])
                backend.open()
            assert backend is not None, "the model comes with the first job"
            result = job.run(backend), None, ""
        except EOFError:
            return
        except Exception as error:
            result = None, picklable_error(error), traceback.format_exc()
        with suppress(ConnectionError):  # the parent was killed, which `recv` finds
            connection.send(Reply(result))


def _mapped(kind: type, function: Callable[[Any], Any], update: Update) -> Update:
    """Apply a function to all parts of an update of one type, but for what was observed."""
    mapped: Update = tree_map_only(kind, function, update._replace(observed=None))
    return mapped._replace(observed=update.observed)


def _as_tensor(array: Any) -> Tensor:
    """Copy an array into a tensor, in memory of a tensor's alignment: some kernels' bits depend on that."""
    return torch.from_numpy(array).clone()


def picklable_error(error: Exception) -> Exception:
    """Return the error itself, or a RunError with its message if it can't be pickled."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = None
    return error if type(again) is type(error) else RunError(f"{type(error).__name__}: {error}")


def _not_importable(error: Exception) -> RunError:
    """Return the error of a child that can't import a class which the parent has, as those of a notebook."""
    said = " ".join(str(error).split())
    return RunError(
        f"engine.backend: other processes can't import what this run uses ({said}); put classes "
        "of a notebook into a file and import them, or set engine.backend to 'sequential' or 'cohort'"
    )


@contextmanager
def _sendable() -> Iterator[None]:
    """Turn errors of pickling, and of too little shared memory, into a RunError of one line."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise RunError(
            f"engine.backend: this run can't be sent to other processes ({error}); define your own classes and "
            "functions at the top level of a module, or use the backend 'sequential'"
        ) from error
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        if "open files" in str(error):
            raise RunError("engine.backend: too many files are open; allow more, as by: ulimit -n 4096") from error
        raise RunError(
            "engine.backend: /dev/shm is too small for the data and the updates of a round; give the container more "
            "(docker run --shm-size 8g), or set engine.backend to 'sequential' or 'cohort'"
        ) from error


_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another that runs but sends nothing. A rank that has ended is noticed at once."""


@dataclass
class RankBackend(Backend):
    """Trains each rank's part of a cohort, and gathers the updates of all ranks on every rank.

    Every rank plays the same rounds from the same server state. Clients are assigned by estimated work, the longest
    first, each to the rank with the least work so far. Updates are exchanged byte for byte, so all ranks continue with
    the same bits. An error is raised on every rank; if another rank has ended, a RunError.
    """

    name: ClassVar[str] = "ranks"
    local: Backend
    work: LocalWork

    def ask_losses(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[float]:
        """See `Backend.ask_losses`; every rank finds the same."""
        assert self.local.ask_losses is not None, "a backend of this machine"
        return self.local.ask_losses(round, cohort, sent)

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
            own = [_on("cpu", update._replace(change=parameters.new_zeros(0))) for update in updates]
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
                by_place[place] = _on(parameters.device, update)._replace(change=row)
        return [by_place[place] for place in range(len(cohort))]


def _on(device: torch.device | str, update: Update) -> Update:
    """Copy an update's tensors to a device; a view would be pickled with the whole storage behind it."""
    return _mapped(Tensor, lambda part: part.to(device, copy=True), update)


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
    """Broadcast the first rank's value to every rank."""
    meet()
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]
