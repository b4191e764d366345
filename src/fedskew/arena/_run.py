"""Runs an arena: trains what is missing of it, on any executor, and keeps it as lines of CSV files in its folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

from fedskew.arena._arena import Arena
from fedskew.arena._federation import FIGURES, Trained, reason_of, train
from fedskew.arena._plan import ArenaJob, Line, Plan
from fedskew.errors import RunError
from fedskew.files import append, locked, write_text, writing
from fedskew.tables import csv_text

OF_FEDERATION = "of:"
"""Prefix of the columns of a federation's figures, since an axis may have the same name as one of them."""

_AHEAD = 2  # calls submitted for each that can run, so that workers need not wait for this process
_RUN = ("stage", "partition", "seed", "lr", "own", "config")


class ArenaProgress(Protocol):
    """Callbacks of `run_arena`."""

    def begin(self, finished: int, runs: int) -> None:
        """Called once, before any run: how many are finished, of how many in all."""

    def ended(self, results: Sequence[tuple[ArenaJob, Trained]]) -> None:
        """Called when a call to the executor ends, with its jobs and what became of each."""


@dataclass(frozen=True)
class ArenaState:
    """The state of an arena.

    Attributes:
        arena: The arena.
        runs: The lines of `runs.csv` that belong to it, tuning runs included.
        federations: Figures of the federations, by the labels of the situation and the partition's seed.
        missing: For each method in each situation that lacks runs, one of the missing jobs and the number missing.
        failures: Runs that failed this time, and why, a line each.
        number: Number of runs in all.
    """

    arena: Arena
    runs: tuple[Line, ...]
    federations: Mapping[tuple[str, ...], Line]
    missing: tuple[tuple[ArenaJob, int], ...] = ()
    failures: tuple[str, ...] = ()
    number: int = 0

    @property
    def compared(self) -> list[Line]:
        """The runs that are compared."""
        return [line for line in self.runs if line["stage"] != "tune" and not line["failure"]]

    @staticmethod
    def read(arena: Arena, out: Path) -> ArenaState:
        """Return the state of an arena in the folder of all runs, without training.

        Raises:
            RunError: Its files can't be read.
        """
        return _state(arena, [Plan(arena, entry) for entry in arena.entries], _Files(arena, arena.folder(out)))


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
        progress: Called as it goes on.

    Raises:
        RunError: The folder can't be written, or another process writes there.
    """
    folder = arena.folder(out)
    plans = [Plan(arena, entry) for entry in arena.entries]
    failures: dict[str, str] = {}
    failed: set[str] = set()
    with locked(folder):
        files = _Files(arena, folder)
        if progress is not None:
            state = _state(arena, plans, files)
            progress.begin(len(state.runs), state.number)
        left = [[*group] for _, group in groupby(plans, lambda plan: plan.entry.situation)]
        waiting: dict[int, list[list[ArenaJob]]] = {}  # by situation, the calls of its step that are not submitted yet
        under_way: dict[Future[list[Trained]], tuple[int, list[ArenaJob]]] = {}

        def take() -> tuple[int, list[ArenaJob]] | None:
            """Take the next call that can begin."""
            for at, own in enumerate(left):
                if own and not waiting.get(at) and all(at != other for other, _ in under_way.values()):
                    waiting[at] = Plan.next_calls(own, files.runs, failed)
                    if not waiting[at]:
                        own.clear()
                if waiting.get(at):
                    return at, waiting[at].pop(0)
            return None

        while True:
            while len(under_way) < _AHEAD * at_once and (call := take()):
                trees = [job.config.tree() for job in call[1]]
                under_way[executor.submit(train, trees, arena.settings.last)] = call
            if not under_way:
                return _state(arena, plans, files, failures)
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                at, jobs = under_way.pop(future)
                reason = future.exception()
                if reason is not None and len(jobs) > 1:  # its process ended, and which run did it is unknown
                    waiting[at] += [[job] for job in jobs]
                    continue
                trained = [Trained({}, {}, reason_of(reason))] if reason else future.result()
                results = list(zip(jobs, trained, strict=True))
                files.add(results)
                for job, result in results:
                    if result.failed:
                        failures[job.name] = result.failed
                        failed.update(job.keys.values())
                if progress is not None:
                    progress.ended(results)


def _state(arena: Arena, plans: Sequence[Plan], files: _Files, failures: Mapping[str, str] | None = None) -> ArenaState:
    runs: list[Line] = []
    missing = []
    for plan in plans:
        own = {**plan.entry.situation, "method": plan.entry.method}  # methods with the same config share its runs
        keys = [key for job in plan.jobs(files.runs) for key in job.keys.values() if key in files.runs]
        runs += [files.runs[key] | own for key in keys]
        if jobs := plan.missing(files.runs):
            missing.append((jobs[0], plan.number - len(keys)))
    return ArenaState(
        arena=arena,
        runs=tuple(sorted(runs, key=lambda line: line["stage"] != "tune")),
        federations=files.federations,
        missing=tuple(missing),
        failures=tuple(f"{name}: {reason}" for name, reason in (failures or {}).items()),
        number=sum(plan.number for plan in plans),
    )


class _Files:
    """`runs.csv` and `federations.csv`: one line for each run and each federation, added whole and never changed."""

    def __init__(self, arena: Arena, folder: Path) -> None:
        self._axes = arena.axes
        self._runs_file, self._federations_file = folder / "runs.csv", folder / "federations.csv"
        lines = _read(self._runs_file, [*arena.axes, "method", *_RUN, *FIGURES])
        self.runs = {line["config"]: line for line in lines}
        lines = _read(self._federations_file, [*arena.axes, "partition"])
        self.federations = {self._key(line): line for line in lines}

    def add(self, trained: Sequence[tuple[ArenaJob, Trained]]) -> None:
        """Add the runs of some jobs, and their federations if they are new, all at once."""
        runs: list[dict[str, str]] = []
        federations: list[dict[str, str]] = []
        for job, result in trained:
            config, situation = job.config, job.entry.situation
            partition = str(config.partition.seed)
            for seed, figures in result.rows.items():
                own = [job.stage, partition, str(seed), f"{config.training.lr:g}", job.own, job.keys[seed]]
                runs.append({**situation, "method": job.entry.method, **dict(zip(_RUN, own, strict=True)), **figures})
            line = {**situation, "partition": partition}
            if result.federation and job.stage == "run" and self._key(line) not in self.federations:
                line |= {f"{OF_FEDERATION}{name}": value for name, value in result.federation.items()}
                self.federations[self._key(line)] = line
                federations.append(line)
        _add(self._runs_file, runs)
        _add(self._federations_file, federations)
        self.runs |= {line["config"]: line for line in runs}

    def _key(self, line: Line) -> tuple[str, ...]:
        return (*(line[axis] for axis in self._axes), line["partition"])


def _read(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: can't be read: {error}") from None
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # the line that was being written when the machine or its power failed
        write_text(path, whole)
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    if whole and list(reader.fieldnames or [])[: len(columns)] != list(columns):
        raise RunError(
            f"{path}: belongs to an arena with other columns than {', '.join(columns)}; write elsewhere with "
            "--out, or give this arena another name"
        )
    lines = list(reader)
    if any(None in line or None in line.values() for line in lines):
        raise RunError(f"{path}: a line has too few or too many cells; mend it, or move the file away")
    return lines


def _add(path: Path, lines: Sequence[Line]) -> None:
    if not lines:
        return
    head = [] if path.exists() and path.stat().st_size else [list(lines[0])]
    with writing(path):
        append(path, csv_text([*head, *(list(line.values()) for line in lines)]).encode())
