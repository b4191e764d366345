"""Several runs at a time, each in a process of its own that ends with the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedskew.engine import Round
from fedskew.errors import FedskewError
from fedskew.experiment._config import Config
from fedskew.experiment._simulate import run_folder, simulate

_SPAWN = multiprocessing.get_context("spawn")  # a forked copy of a process that has used torch's threads can hang

RoundEnded = Callable[[int, int, float | None], None]
"""Called with the number of a run in the list, a round that it has ended, and the test accuracy where evaluated."""
RunEnded = Callable[[int, str | None], None]
"""Called with the number of a run in the list, and why it failed, if it did."""


def run_all(configs: Sequence[Config], out: Path, processes: int, round_ended: RoundEnded, run_ended: RunEnded) -> None:
    """Run every config in its folder under `out`, from its checkpoint where it has one, so many at a time.

    A run that fails, or whose process is killed, does not stop the others. An interrupt stops all, each after a
    checkpoint; a second one, at once. Should this process be killed, the others end by themselves.
    """
    waiting = deque(range(len(configs)))
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                worker = _Worker(out)
                workers[worker.connection] = worker
                worker.begin(waiting.popleft(), configs)
            for connection in wait(list(workers)):
                worker = workers[connection]  # type: ignore[index]
                kind, *said = worker.receive()
                if kind == "round":
                    round_ended(worker.job, *said)
                    continue
                run_ended(worker.job, None if kind == "done" else said[0])
                if kind == "done" and waiting:
                    worker.begin(waiting.popleft(), configs)
                else:  # after a failure a fresh process goes on: who knows what this one has left behind
                    del workers[worker.connection]
                    worker.end()
    finally:
        _stop(list(workers.values()))


class _Worker:
    """A process that runs one config after another, as seen from the process that started it."""

    def __init__(self, out: Path) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_work, args=(theirs, out))
        with _interrupts_blocked():
            self.process.start()
        theirs.close()

    def begin(self, job: int, configs: Sequence[Config]) -> None:
        self.job = job
        with suppress(ConnectionError):  # it has died: `receive` will say so
            self.connection.send(configs[job].tree())

    def receive(self) -> tuple[Any, ...]:
        """`("round", number, accuracy)`, `("done",)` or `("failed", why)`."""
        try:
            said: tuple[Any, ...] = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return "failed", f"its process ended early ({_ending(self.process.exitcode)}); run it again to go on"
        return said

    def end(self) -> None:
        with suppress(ConnectionError):
            self.connection.send(None)
        self.process.join()
        self.connection.close()


def _stop(workers: Sequence[_Worker]) -> None:
    """Interrupt, and wait for the checkpoints."""
    try:
        for worker in workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)
        for worker in workers:
            worker.process.join()
    finally:
        for worker in workers:
            worker.process.kill()
            worker.connection.close()


def _ending(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit status {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"{name}, perhaps for want of memory" if name == "SIGKILL" else name


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is started here is born deaf to Ctrl-C, until it can answer to it (see `_listen`)."""
    if sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # it is started with the first process, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, out: Path) -> None:
    """What a process does: run what it is sent until it is sent None."""
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def progress(record: Round) -> None:
        evaluation = record["evaluation"]
        connection.send(("round", record["round"], None if evaluation is None else evaluation["accuracy"]))

    with suppress(KeyboardInterrupt, EOFError):
        _listen()
        while (tree := connection.recv()) is not None:
            try:
                simulate(tree, out=out, resume=True, progress=progress)
            except FedskewError as error:
                connection.send(("failed", str(error)))
            except Exception as error:
                again = f"fedskew --debug run {run_folder(Config.model_validate(tree), out)}/config.toml --resume"
                why = f"{type(error).__name__}: {' '.join(str(error).split())} (for the traceback: {again} --out {out})"
                connection.send(("failed", why))
            else:
                connection.send(("done",))


def _end_with_parent() -> None:
    """End this process when the one that started it is gone: two must never write one run folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process only"
    parent.join()
    os._exit(1)


def _listen() -> None:
    """Answer to the first Ctrl-C, and to no other: a terminal and the parent may both send it."""
    answered = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal answered
        if not answered:
            answered = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
