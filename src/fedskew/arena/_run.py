"""Runs an arena: trains what is missing of it, on any executor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Protocol

from fedskew.arena._arena import Arena
from fedskew.arena._federation import Trained, train
from fedskew.arena._files import ArenaFiles
from fedskew.arena._jobs import ArenaJob, Plan, next_calls
from fedskew.errors import FedskewError
from fedskew.files import locked

_AHEAD = 2  # calls submitted for each that can run, so that workers need not wait for this process


class ArenaProgress(Protocol):
    """Callbacks of `run_arena`."""

    def begin(self, finished: int, runs: int) -> None:
        """Called once, before any run.

        Args:
            finished: Number of runs that were finished before.
            runs: Number of runs in all.
        """

    def ended(self, results: Sequence[tuple[ArenaJob, Trained]]) -> None:
        """Called when a call to the executor ends.

        Args:
            results: The jobs that it trained, each one config with some seeds, and what became of each.
        """


@dataclass(frozen=True)
class ArenaState:
    """The state of an arena: its finished runs.

    Attributes:
        arena: The arena.
        runs: The lines of `runs.csv` that belong to it, tuning runs included.
        compared: Those of compared runs.
        federations: Figures of the federations, by the labels of the situation and the partition's seed.
        failures: Runs that failed this time, and why, a line each.
        finished: Number of finished runs.
        number: Number of runs in all.
    """

    arena: Arena
    runs: tuple[Mapping[str, str], ...]
    compared: tuple[Mapping[str, str], ...]
    federations: Mapping[tuple[str, ...], Mapping[str, str]]
    failures: tuple[str, ...] = ()
    finished: int = 0
    number: int = 0


def run_arena(
    arena: Arena, out: Path, executor: Executor, at_once: int, progress: ArenaProgress | None = None
) -> ArenaState:
    """Train what is missing of an arena.

    The runs of a call become lines of `runs.csv` when it ends. An arena that is started again trains only what is
    missing, whether it was stopped, has got further methods or situations, or is restricted by another `only`.

    Args:
        arena: The arena.
        out: The folder of all runs, such as `runs`.
        executor: Where federations are trained; it is given a function of this package and plain values.
        at_once: How many calls the executor can run at a time.
        progress: Callbacks.

    Returns:
        The state that it reached.

    Raises:
        RunError: The folder can't be written, or another process writes there.
    """
    folder = arena.folder(out)
    plans = [Plan(arena, entry) for entry in arena.entries]
    failures: dict[str, str] = {}
    failed: set[str] = set()
    with locked(folder):
        files = ArenaFiles(arena, folder)
        state = _state(arena, plans, files, {})
        if progress is not None:
            progress.begin(state.finished, state.number)
        situations = [_Situation([*group]) for _, group in groupby(plans, lambda plan: plan.entry.situation)]
        under_way: dict[Future[list[Trained]], tuple[_Situation, list[ArenaJob]]] = {}
        while True:
            for situation in situations:
                while len(under_way) < _AHEAD * at_once and (call := situation.take(files.runs, failed)):
                    future = executor.submit(train, [job.config.tree() for job in call], arena.last)
                    under_way[future] = situation, call
                if len(under_way) == _AHEAD * at_once:
                    break
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                situation, call = under_way.pop(future)
                situation.under_way -= 1
                reason = future.exception()
                if reason is not None and len(call) > 1:  # its process ended, and which run did it is unknown
                    situation.waiting += [[job] for job in call]
                    continue
                results = list(zip(call, [_lost(reason)] if reason else future.result(), strict=True))
                files.add(results)
                for job, trained in results:
                    if trained.failed:
                        failures[job.name] = trained.failed
                        failed.update(job.keys.values())
                if progress is not None:
                    progress.ended(results)
        return _state(arena, plans, files, failures)


def read_state(arena: Arena, out: Path) -> ArenaState:
    """Return the state of an arena, without training.

    Args:
        arena: The arena.
        out: The folder of all runs, such as `runs`.

    Raises:
        RunError: Its files can't be read.
    """
    return _state(arena, [Plan(arena, entry) for entry in arena.entries], ArenaFiles(arena, arena.folder(out)), {})


def missing_jobs(arena: Arena, out: Path) -> list[tuple[ArenaJob, int]]:
    """Return, for each method in each situation that lacks runs, one of the missing jobs and the number missing.

    Args:
        arena: The arena.
        out: The folder of all runs, such as `runs`.
    """
    files = ArenaFiles(arena, arena.folder(out))
    found = []
    for plan in (Plan(arena, entry) for entry in arena.entries):
        jobs = plan.missing(files.runs)
        if jobs:
            done = sum(key in files.runs for job in _known(plan, files) for key in job.keys.values())
            found.append((jobs[0], plan.number - done))
    return found


@dataclass
class _Situation:
    """What is still to be trained in one situation.

    Attributes:
        plans: The methods.
        waiting: Calls of this step that are not submitted yet.
        under_way: Number of calls that are.
        is_finished: Whether nothing is left.
    """

    plans: Sequence[Plan]
    waiting: list[list[ArenaJob]] = field(default_factory=list)
    under_way: int = 0
    is_finished: bool = False

    def take(self, runs: Mapping[str, Mapping[str, str]], failed: Collection[str]) -> list[ArenaJob] | None:
        """Return a call that can begin now; None while there is none."""
        if not self.waiting and not self.under_way and not self.is_finished:
            self.waiting = next_calls(self.plans, runs, failed)
            self.is_finished = not self.waiting
        if not self.waiting:
            return None
        self.under_way += 1
        return self.waiting.pop(0)


def _lost(error: BaseException) -> Trained:
    """Return what became of a config whose process was killed, or whose cluster failed."""
    reason = str(error) if isinstance(error, FedskewError) else f"{type(error).__name__}: {error}"
    return Trained({}, {}, " ".join(reason.split()))


def _known(plan: Plan, files: ArenaFiles) -> list[ArenaJob]:
    return [*plan.tuned(files.runs), *plan.compared(files.runs)]


def _state(arena: Arena, plans: Sequence[Plan], files: ArenaFiles, failures: Mapping[str, str]) -> ArenaState:
    runs: list[Mapping[str, str]] = []
    compared: list[Mapping[str, str]] = []
    for plan in plans:
        own = {**plan.entry.situation, "method": plan.entry.method}  # methods with the same config share its runs
        for jobs, lines in ((plan.tuned(files.runs), runs), (plan.compared(files.runs), compared)):
            lines += [files.runs[key] | own for job in jobs for key in job.keys.values() if key in files.runs]
    return ArenaState(
        arena=arena,
        runs=(*runs, *compared),
        compared=tuple(line for line in compared if not line["failure"]),
        federations=files.federations,
        failures=tuple(f"{name}: {reason}" for name, reason in failures.items()),
        finished=len(runs) + len(compared),
        number=sum(plan.number for plan in plans),
    )
