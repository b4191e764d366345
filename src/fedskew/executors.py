"""Executors for calls in processes of this machine or on a Dask cluster's workers, as in `concurrent.futures`.

with executor(processes=2) as (pool, at_once):
    future = pool.submit(function, argument)
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from fedskew.children import Child, Reply, hear_interrupts
from fedskew.errors import RunError, optional

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SECONDS = 10
_LOST_WORKERS = 3
_parent: Connection | None = None  # of a child process


class Processes(Executor):
    """Runs calls in so many child processes of this one, which end with it even if it is killed. A child that is killed
    fails its own call only. `hear` is called, in a thread, with what a call passes to `report` before it ends."""

    def __init__(self, number: int, hear: Callable[[Any], None] = lambda value: None) -> None:
        self._threads = ThreadPoolExecutor(number)  # each waits for a child's reply
        self._idle: SimpleQueue[Child] = SimpleQueue()
        self._children: set[Child] = set()
        self._hear = hear
        self._ended = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function, importable from a module, in a child process."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes; without `wait`, interrupt running calls, as Ctrl-C does; a second Ctrl-C kills."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._ended = True
        try:
            for child in list(self._children):
                child.interrupt()
            self._threads.shutdown()
            for child in list(self._children):
                child.connection.close()  # one that was being started has heard no interrupt
                child.process.join()
        finally:
            for child in list(self._children):
                child.kill()

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            child = self._idle.get_nowait()
        except Empty:
            # A module of a user's own may fail in the server that forks, or compute, after which forks can hang.
            own = getattr(fn, "__module__", None) or ""
            child = Child(_serve, loads=own if own.startswith("fedskew.") else "")
            self._children.add(child)
        try:
            if self._ended:
                raise RunError("stopped")
            child.send((fn, args, kwargs))
            while not (reply := child.receive()).done:
                self._hear(reply.value)
        except (EOFError, ConnectionError):
            said = child.how_it_ended()
            self._children.discard(child)
            child.kill()
            raise RunError(f"its process ended early ({said}); start it again to go on") from None
        self._idle.put(child)
        returned, value = reply.value
        if returned:
            return value
        raise value


def report(value: Any) -> bool:
    """Tell `hear` of the process that made this call something; return whether it can hear it."""
    if _parent is not None:
        _parent.send(Reply(value, done=False))
    return _parent is not None


def _serve(connection: Connection) -> None:
    """Answer calls until the connection ends, be it by the parent's death in the middle of an answer."""
    global _parent
    _parent = connection
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        hear_interrupts()
        while True:
            fn, args, kwargs = connection.recv()
            try:
                answer = True, fn(*args, **kwargs)
            except Exception as error:
                answer = False, error
            connection.send(Reply(answer))


@contextmanager
def executor(
    processes: int, on: str | None = None, hear: Callable[[Any], None] = lambda value: None
) -> Iterator[tuple[Executor, int]]:
    """Open an executor, and end it with the block; at once if the block raises an error. Calls run in `processes` of
    this machine, or on the workers of the Dask scheduler `on`, such as `tcp://10.0.0.1:8786`, which report nothing
    (RunError where none answers). Yields the executor, and how many calls it can run at a time."""
    if on is not None:
        with _dask(on) as opened:
            yield opened
        return
    pool = Processes(processes, hear)
    try:
        yield pool, processes
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _dask(address: str) -> Iterator[tuple[Executor, int]]:
    connect = optional("distributed:Client", "--on: needs Dask: pip install 'fedskew[dask]'")
    start = f"dask worker {address} --nthreads 1"
    try:
        client = connect(address, timeout=_SECONDS, set_as_default=False)
    except (OSError, ValueError, TimeoutError):
        raise RunError(
            f"--on {address}: no Dask scheduler answers there; start one with: dask scheduler, and on each machine: "
            f"{start}"
        ) from None
    with client:
        at_once = sum(client.ncores().values())
        if not at_once:
            raise RunError(f"--on {address}: the scheduler has no workers; start some: {start}")
        # A call whose worker is lost is given to another worker, so many times.
        yield client.get_executor(pure=False, retries=_LOST_WORKERS), at_once


def cores() -> int:
    """Return the processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
