"""Run a sweep: what is missing of it, several runs at a time, and then its tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedskew.errors import ArgumentError, FedskewError
from fedskew.experiment._config import Config, cores
from fedskew.experiment._folder import SeedRun, read_runs
from fedskew.experiment._grid import Cell, Sweep
from fedskew.experiment._report import write_report
from fedskew.experiment._setup import choose_device, make_task, make_training_loop
from fedskew.experiment._simulate import run_folder
from fedskew.experiment._sweep_tables import Row, row_of, write_tables
from fedskew.experiment._trackers import make_trackers
from fedskew.experiment._workers import run_all


@dataclass(frozen=True)
class Job:
    """One seed of one cell: a run by itself."""

    cell: Cell
    seed: int

    @property
    def config(self) -> Config:
        """The config of this seed alone."""
        return self.cell.config.for_seed(self.seed)

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"{self.cell.label}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Its run folder."""
        return run_folder(self.config, out)

    def is_finished(self, out: Path) -> bool:
        """Whether nothing is left to do; a run's page is written last."""
        return all((self.folder(out) / file).exists() for file in ("summary.json", "report.html"))


class Watcher(Protocol):
    """What `run_sweep` tells as it goes."""

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """These are to be run; so many others were there already."""

    def round(self, job: Job, round: int, accuracy: float | None) -> None:
        """A round has ended; a resumed run tells its earlier rounds again."""

    def ended(self, job: Job, failure: str | None) -> None:
        """A run has ended, well or for this reason."""


@dataclass(frozen=True)
class SweepResult:
    """What `run_sweep` returns. `failures`: one line for each run that failed; `folder`: where the tables are."""

    sweep: Sweep
    rows: tuple[Row, ...]
    failures: tuple[str, ...]
    folder: Path

    @property
    def report(self) -> Path:
        """The page that compares all runs; there is none where no run came to an end."""
        return self.folder / "report.html"


def jobs_of(sweep: Sweep) -> list[Job]:
    """Every seed of every cell, in order."""
    return [Job(cell, seed) for cell in sweep.cells for seed in cell.config.seeds]


def run_sweep(
    sweep: Sweep, out: str | Path, processes: int | None = None, watcher: Watcher | None = None
) -> SweepResult:
    """Do what is missing of a sweep under `out`, so many runs at a time, and write its tables and its report.

    Finished runs are read, half ones go on from their checkpoint. `processes`: by default as many as the cores allow
    with the config's threads for each; one where the device is a GPU. The tables are the same, seconds aside,
    whatever the number of processes and however often the sweep was stopped.

    Raises ConfigError, DataError or PartitionError, naming the cell, before anything is run.
    """
    out = Path(out)
    if processes is not None and processes < 1:
        raise ArgumentError(f"processes: must be at least 1, not {processes}")
    jobs = jobs_of(sweep)
    missing = [job for job in jobs if not job.is_finished(out)]
    _check(missing, out)
    if watcher is not None:
        watcher.begin(missing, len(jobs) - len(missing))
    reasons: dict[int, str] = {}

    def round_ended(number: int, round: int, accuracy: float | None) -> None:
        if watcher is not None:
            watcher.round(missing[number], round, accuracy)

    def run_ended(number: int, failure: str | None) -> None:
        if failure is not None:
            reasons[number] = failure
        if watcher is not None:
            watcher.ended(missing[number], failure)

    configs = [job.config for job in missing]
    run_all(configs, out, processes or _default_processes(configs), round_ended, run_ended)
    failures = [f"{missing[number].name}: {reasons[number]}" for number in sorted(reasons)]
    runs: list[SeedRun] = []
    for job in jobs:
        if job.is_finished(out):
            try:
                runs += read_runs(job.folder(out), job.cell.label)
            except FedskewError as error:
                failures.append(f"{job.name}: {error}; delete the folder and start again")
    rows = tuple(row_of(cell, [run for run in runs if run.label == cell.label], sweep.accuracy) for cell in sweep.cells)
    result = SweepResult(sweep, rows, tuple(failures), sweep.folder(out))
    write_tables(sweep, rows, runs, out, result.folder)
    if runs:
        write_report(runs, result.report, sweep.name)
    return result


def _check(jobs: Sequence[Job], out: Path) -> None:
    """Set up every cell once, for its first seed: what can't be loaded, divided or built is refused before any run."""

    def task_of(job: Job) -> str:
        tree = job.config.tree()
        return json.dumps([tree["data"], tree["partition"], tree["target"], job.seed])

    first = {job.cell.label: job for job in reversed(jobs)}.values()
    # Cells of one task stand together, so that only one data set at a time is in memory.
    for _, cells in itertools.groupby(sorted(first, key=task_of), task_of):
        task = None
        for job in cells:
            try:
                choose_device(job.config.engine.device)
                make_trackers(job.config.output.trackers, job.folder(out))
                task = task or make_task(job.config, job.seed)
                make_training_loop(_on_cpu(job.config), job.seed, job.folder(out), task)
            except FedskewError as error:
                raise type(error)(f"cell {job.cell.label!r}: {error}") from None


def _on_cpu(config: Config) -> Config:
    return config.model_copy(update={"engine": config.engine.model_copy(update={"device": "cpu", "capture": False})})


def _default_processes(configs: Sequence[Config]) -> int:
    if any(choose_device(config.engine.device).type == "cuda" for config in configs):
        return 1
    engines = [config.engine for config in configs]
    return max(1, cores() // max((engine.threads * engine.number_of_processes() for engine in engines), default=1))
