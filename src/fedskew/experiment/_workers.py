"""Several runs at a time, each in a process of its own that ends with the one that started it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedskew.children import Child, hear_interrupts
from fedskew.engine import Round
from fedskew.errors import FedskewError
from fedskew.experiment._config import Config
from fedskew.experiment._simulate import run_folder, simulate

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
                workers[worker.child.connection] = worker
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
                    del workers[worker.child.connection]
                    worker.end()
    finally:
        _stop(list(workers.values()))


class _Worker:
    """A process that runs one config after another, as seen from the process that started it."""

    def __init__(self, out: Path) -> None:
        self.child = Child(_work, out)

    def begin(self, job: int, configs: Sequence[Config]) -> None:
        self.job = job
        with suppress(ConnectionError):  # it has died: `receive` will say so
            self.child.connection.send(configs[job].tree())

    def receive(self) -> tuple[Any, ...]:
        """`("round", number, accuracy)`, `("done",)` or `("failed", why)`."""
        try:
            said: tuple[Any, ...] = self.child.connection.recv()
        except (EOFError, ConnectionError):
            return "failed", f"its process ended early ({self.child.how_it_ended()}); run it again to go on"
        return said

    def end(self) -> None:
        with suppress(ConnectionError):
            self.child.connection.send(None)
        self.child.process.join()
        self.child.connection.close()


def _stop(workers: Sequence[_Worker]) -> None:
    """Interrupt, and wait for the checkpoints."""
    try:
        for worker in workers:
            worker.child.interrupt()
        for worker in workers:
            worker.child.process.join()
    finally:
        for worker in workers:
            worker.child.kill()


def _work(connection: Connection, out: Path) -> None:
    """What a process does: run what it is sent until it is sent None."""

    def progress(record: Round) -> None:
        evaluation = record["evaluation"]
        connection.send(("round", record["round"], None if evaluation is None else evaluation["accuracy"]))

    with suppress(KeyboardInterrupt, EOFError):
        hear_interrupts()
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
