"""Trains several runs at a time, each in its own process, which ends with the process that started it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedskew.children import Child, Died, Pool, Reply, hear_interrupts
from fedskew.errors import FedskewError
from fedskew.experiment._config import Config, resolve
from fedskew.experiment._dataset import shared_data
from fedskew.experiment._simulate import run_config, run_folder

RoundEnded = Callable[[int, int, float | None], None]
"""Called with the number of a run in the list, a round that it has ended, and the test accuracy where evaluated."""
RunEnded = Callable[[int, str | None], None]
"""Called with the number of a run in the list, and why it failed, if it did."""


def run_all(configs: Sequence[Config], out: Path, processes: int, round_ended: RoundEnded, run_ended: RunEnded) -> None:
    """Run every config in its folder under `out`, from its checkpoint where it has one, so many at a time.

    A run that fails, or whose process is killed, does not stop the others. An interrupt stops all, each after a
    checkpoint; a second one, at once. Should this process be killed, the others end by themselves.
    """
    pool = Pool(partial(Child, _run, out), processes)
    try:
        for job, reply in pool.run([config.tree() for config in configs]):
            if not reply.done:
                round_ended(job, *reply.value)
            elif isinstance(reply.value, Died):
                run_ended(job, f"its process ended early ({reply.value}); run it again to go on")
            else:
                run_ended(job, reply.value)
    finally:
        pool.interrupt()


def _run(connection: Connection, out: Path) -> None:
    """Run the configs that are sent, and reply with each round and with the reason of a failure, None without one."""

    def progress(record: Mapping[str, Any]) -> None:
        evaluation = record["evaluation"]
        accuracy = None if evaluation is None else evaluation["accuracy"]
        connection.send(Reply((record["round"], accuracy), done=False))

    with suppress(KeyboardInterrupt, EOFError), shared_data():
        hear_interrupts()
        failure: str | None = None
        while failure is None:  # after a failure a fresh process goes on: who knows what is left in this one's memory
            tree = connection.recv()
            try:
                config = resolve(tree)
                run_config(config, run_folder(config, out), resume=True, progress=progress, scripts=out)
            except FedskewError as error:
                failure = str(error)
            except Exception as error:
                again = f"fedskew --debug run {run_folder(Config.model_validate(tree), out)}/config.toml --resume"
                said = " ".join(str(error).split())
                failure = f"{type(error).__name__}: {said} (for the traceback: {again} --out {out})"
            connection.send(Reply(failure, exits=failure is not None))
