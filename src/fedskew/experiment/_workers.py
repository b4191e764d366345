"""Trains several runs at a time: in processes that end with the one that started them, or on any executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedskew.errors import FedskewError
from fedskew.executors import executor, report
from fedskew.experiment._config import Config, resolve
from fedskew.experiment._dataset import keep_data
from fedskew.experiment._simulate import is_finished, run_config, run_folder

Round = tuple[int, float | None]
"""A round that a run has ended, and the test accuracy where it was evaluated."""
RoundEnded = Callable[[int, int, float | None], None]
"""Called with the number of a run in the list, and its `Round`."""
RunEnded = Callable[[int, str | None], None]
"""Called with the number of a run in the list, and why it failed, if it did."""


def run_all(
    configs: Sequence[Config],
    out: Path,
    pool: Executor | None,
    processes: int,
    round_ended: RoundEnded,
    run_ended: RunEnded,
) -> None:
    """Run every config in its folder under `out`, from its checkpoint where it has one.

    A run that fails, or whose process is killed, does not stop the others. An interrupt stops all, each after a
    checkpoint; a second one, at once. Should this process be killed, the others end by themselves. The workers of an
    executor share that folder with this process, and report rounds when their run has ended.

    Args:
        configs: The configs.
        out: The folder of all runs.
        pool: Where they are trained; None: in so many `processes` of this machine.
        processes: See `pool`.
        round_ended: Called after each round.
        run_ended: Called after each run.
    """
    place = out.resolve()
    events: SimpleQueue[tuple[int, Round | Future[Any]]] = SimpleQueue()
    with ExitStack() as stack:
        if pool is None:
            pool, _ = stack.enter_context(executor(processes, hear=events.put))
        under_way = [pool.submit(train_run, number, config.tree(), place) for number, config in enumerate(configs)]
        for number, future in enumerate(under_way):
            future.add_done_callback(lambda future, number=number: events.put((number, future)))  # type: ignore[misc]
        left = len(configs)
        try:
            while left:
                number, event = events.get()
                if isinstance(event, tuple):
                    round_ended(number, *event)
                    continue
                left -= 1
                rounds, failure = _result(event)
                for ended in rounds:
                    round_ended(number, *ended)
                if failure is None and not is_finished(run_folder(configs[number], out)):
                    failure = (
                        f"its worker wrote to another {place}: give a folder that all workers share with this machine"
                    )
                run_ended(number, failure)
        finally:
            for future in under_way:
                future.cancel()


def _result(future: Future[tuple[list[Round], str | None]]) -> tuple[list[Round], str | None]:
    try:
        return future.result()
    except FedskewError as error:  # its process was killed
        return [], str(error)
    except Exception as error:  # of the cluster, as when worker after worker is lost
        return [], f"{type(error).__name__}: {' '.join(str(error).split())}"


def train_run(number: int, tree: Mapping[str, Any], out: Path) -> tuple[list[Round], str | None]:
    """Run one config, from its checkpoint where it has one; return rounds not yet reported, and why it failed."""
    rounds: list[Round] = []
    keep_data()

    def listen(record: Mapping[str, Any]) -> None:
        evaluation = record["evaluation"]
        ended = record["round"], None if evaluation is None else evaluation["accuracy"]
        if not report((number, ended)):
            rounds.append(ended)

    try:
        config = resolve(tree)
        run_config(config, run_folder(config, out), resume=True, progress=listen, scripts=out)
    except FedskewError as error:
        return rounds, str(error)
    except Exception as error:
        again = f"fedskew --debug run {run_folder(Config.model_validate(tree), out)}/config.toml --resume"
        said = " ".join(str(error).split())
        return rounds, f"{type(error).__name__}: {said} (for the traceback: {again} --out {out})"
    return rounds, None
