"""Run a sweep: what is missing of it, several runs at a time, and then its tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from fedskew import report
from fedskew.errors import ArgumentError, ConfigError, FedskewError, PartitionError, RunError
from fedskew.experiment._config import Config
from fedskew.experiment._dataset import content_of, data_seed, load_dataset, shared_data
from fedskew.experiment._folder import read_runs
from fedskew.experiment._grid import Cell, Sweep
from fedskew.experiment._identity import Present, changed_since, set_aside
from fedskew.experiment._preflight import changed_batches
from fedskew.experiment._sections import cores
from fedskew.experiment._setup import choose_device, try_out
from fedskew.experiment._simulate import is_finished, run_folder
from fedskew.experiment._sweep_tables import CellResult, rows_of, table_notes, write_tables
from fedskew.experiment._task import make_task
from fedskew.experiment._workers import run_all
from fedskew.files import locked
from fedskew.report import SeedRun


@dataclass(frozen=True)
class Job:
    """One seed of one cell, which is a run by itself.

    Attributes:
        cell: The cell.
        seed: The seed.
    """

    cell: Cell
    seed: int

    @property
    def config(self) -> Config:
        """Config of this seed alone."""
        return self.cell.config.for_seed(self.seed)

    @property
    def key(self) -> tuple[str, int]:
        """Label of the cell, and seed."""
        return self.cell.label, self.seed

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.cell.label}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return the job's run folder.

        Args:
            out: The folder that all run folders are in.
        """
        return run_folder(self.config, out)

    def is_finished(self, out: Path) -> bool:
        """Return whether the run is finished.

        Args:
            out: The folder that all run folders are in.
        """
        return is_finished(self.folder(out))


class SweepProgress(Protocol):
    """Callbacks of `run_sweep`."""

    def refused(self, label: str, reason: str) -> None:
        """Called before `begin` for each cell that can't be run, while others can.

        Args:
            label: The cell's name.
            reason: Why it can't.
        """

    def moved(self, folders: Sequence[Path]) -> None:
        """Called before `begin` where runs that are trained anew were moved aside.

        Args:
            folders: Where these runs are now.
        """

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """Called once, before any run.

        Args:
            jobs: The runs to do.
            finished: How many others were finished before.
        """

    def round(self, job: Job, round: int, accuracy: float | None) -> None:
        """Called after each round; a resumed run calls it for its earlier rounds again.

        Args:
            job: The run.
            round: Number of the round.
            accuracy: Test accuracy, a share; None where the round was not evaluated.
        """

    def ended(self, job: Job, failure: str | None, accuracy: float | None) -> None:
        """Called after each run.

        Args:
            job: The run.
            failure: Why it failed; None if it didn't.
            accuracy: The accuracy that stands for it, as in the table; None where there is none.
        """


@dataclass(frozen=True)
class SweepResult:
    """The result of `run_sweep`.

    Attributes:
        sweep: The sweep.
        rows: The result of each cell; of one whose method has a finish two, as trained and after it.
        failures: One line for each run that failed.
        folder: Where the tables are.
        refused: One line for each cell that was not run, as it makes no sense or can't be set up.
    """

    sweep: Sweep
    rows: tuple[CellResult, ...]
    failures: tuple[str, ...]
    folder: Path
    refused: tuple[str, ...] = ()

    @property
    def report(self) -> Path:
        """The page that compares all runs; it is missing where no run finished."""
        return self.folder / "report.html"


def jobs_of(sweep: Sweep) -> list[Job]:
    """Return every seed of every cell, in order.

    Args:
        sweep: The sweep.
    """
    return [Job(cell, seed) for cell in sweep.cells for seed in cell.config.seeds]


def configs_of(jobs: Sequence[Job]) -> list[Config]:
    """Return the config of each cell that some jobs are of, with the seeds of these jobs.

    Args:
        jobs: The jobs.
    """
    seeds: dict[str, list[int]] = {}
    configs = {job.cell.label: job.cell.config for job in jobs}
    for job in jobs:
        seeds.setdefault(job.cell.label, []).append(job.seed)
    return [config.model_copy(update={"seeds": seeds[label]}) for label, config in configs.items()]


def run_sweep(
    sweep: Sweep,
    out: str | Path,
    processes: int | None = None,
    progress: SweepProgress | None = None,
    fresh: bool = False,
    executor: Executor | None = None,
) -> SweepResult:
    """Do what is missing of a sweep, and write its tables and its report.

    Finished runs are read, interrupted ones continue from their checkpoint. Seconds aside, the tables do not depend on
    the number of processes nor on how often the sweep was stopped. A cell that can't be set up, such as one whose
    partition the data do not give, is left out while others can be; it stands in the tables with its reason.

    Args:
        sweep: The sweep, as `read_sweep` returns it.
        out: Where run folders and the sweep's own folder go.
        processes: How many runs at a time; by default as many as the cores allow with the config's threads for each,
            and one on a GPU.
        progress: Callbacks.
        fresh: Train anew what was made by other code, of other data or by another version of fedskew, or is damaged;
            such folders are moved to `earlier/`.
        executor: Where runs are trained, in place of processes of this machine; its workers share `out` with this
            process (see `fedskew.executors`).

    Returns:
        The result of every cell, and which runs failed.

    Raises:
        ConfigError: No cell can be set up; nothing has been run then. The message names the first cell.
        PartitionError: The same, where its data can't be divided.
        DataError: Data of some cell are missing; nothing has been run then.
        MissingPackageError: The same, for an optional package.
        ArgumentError: `processes` is below 1.
        RunError: Some of its runs were made of something else and `fresh` is not set, or another process runs it.
    """
    out = Path(out)
    if processes is not None and processes < 1:
        raise ArgumentError(f"processes: must be at least 1, not {processes}")
    jobs = jobs_of(sweep)
    with ExitStack() as held:
        with shared_data():
            stale = _stale(jobs, out, damaged_too=fresh)
            if stale and not fresh:
                raise RunError(_say_stale(stale, len(jobs), out))
            anew = [job for job, _ in stale]
            missing = [job for job in jobs if job in anew or not job.is_finished(out)]
            refused = _refused(missing, anew, out)
            if len(refused) == len(jobs):
                error = next(iter(refused.values()))
                raise type(error)(f"cell {jobs[0].cell.label!r}: {error}")
            to_run = [job for job in missing if job.key not in refused]
            held.enter_context(locked(sweep.folder(out)))
            moved = _set_aside(anew, out)
            if progress is not None:
                if moved:
                    progress.moved(moved)
                for label, reason in _reasons(sweep, refused).items():
                    progress.refused(label, reason)
                progress.begin(to_run, len(jobs) - len(missing))
        failed = _run_all(to_run, out, processes, progress, executor)
        return _write(sweep, out, jobs, failed, refused)


def _run_all(
    jobs: Sequence[Job], out: Path, processes: int | None, progress: SweepProgress | None, executor: Executor | None
) -> dict[tuple[str, int], str]:
    """Run jobs, and return why some failed."""
    reasons: dict[int, str] = {}

    def round_ended(number: int, round: int, accuracy: float | None) -> None:
        if progress is not None:
            progress.round(jobs[number], round, accuracy)

    def run_ended(number: int, failure: str | None) -> None:
        if failure is not None:
            reasons[number] = failure
        if progress is not None:
            progress.ended(jobs[number], failure, None if failure is not None else _accuracy_of(jobs[number], out))

    configs = [job.config for job in jobs]
    run_all(configs, out, executor, processes or _default_processes(configs), round_ended, run_ended)
    return {jobs[number].key: reasons[number] for number in sorted(reasons)}


def _runs_of(job: Job, out: Path) -> list[SeedRun]:
    """Read a finished run, whose headline figures are those that the sweep asks for now."""
    found = read_runs(job.folder(out), job.cell.label)
    return [report.as_summarised(run, job.config.evaluation.summary) for run in found]


def _accuracy_of(job: Job, out: Path) -> float | None:
    """Return the accuracy that stands for a finished run; None where there is none, or it can't be read."""
    with suppress(FedskewError):
        return next((report.headline(run).get("accuracy") for run in _runs_of(job, out)), None)
    return None


def _write(
    sweep: Sweep,
    out: Path,
    jobs: Sequence[Job],
    failed: dict[tuple[str, int], str],
    refused: Mapping[tuple[str, int], FedskewError],
) -> SweepResult:
    """Read what is finished, and write tables and report."""
    runs: list[SeedRun] = []
    for job in jobs:
        if job.is_finished(out):
            try:
                runs += _runs_of(job, out)
            except FedskewError as error:
                failed[job.key] = str(error)
    rows = tuple(
        row
        for cell in sweep.cells
        for row in rows_of(
            cell,
            [run for run in runs if run.label == cell.label],
            sweep.accuracy,
            {seed: reason for (label, seed), reason in failed.items() if label == cell.label},
            {seed: str(reason) for (label, seed), reason in refused.items() if label == cell.label},
        )
    )
    failures = tuple(f"{label}, seed {seed}: {reason}" for (label, seed), reason in failed.items())
    left_out = tuple(f"{label}: {reason}" for label, reason in _reasons(sweep, refused).items())
    result = SweepResult(sweep, rows, failures, sweep.folder(out), left_out)
    write_tables(sweep, rows, runs, out, result.folder)
    if runs:
        report.write_report(
            runs,
            result.report,
            sweep.name,
            axes={row.cell.label: row.cell.values for row in rows},
            accuracy=sweep.accuracy,
            notes=table_notes(sweep, rows, runs),
        )
    return result


def _reasons(sweep: Sweep, refused: Mapping[tuple[str, int], FedskewError]) -> dict[str, str]:
    """Why cells are refused, by label: those that make no sense, and those that can't be set up for some seed."""
    found = {cell.label: cell.reason for cell in sweep.refused}
    for (label, _), reason in refused.items():
        found.setdefault(label, str(reason))
    return found


def _set_aside(jobs: Sequence[Job], out: Path) -> list[Path]:
    """Move the folders of runs that start over aside, and return where they are."""
    for job in jobs:
        with locked(job.folder(out)):
            pass  # what another process is at work on stays where it is
    return [place for job in jobs if (place := set_aside(job.folder(out))) is not None]


def _stale(jobs: Sequence[Job], out: Path, damaged_too: bool) -> list[tuple[Job, list[str]]]:
    """Return the runs in the folders that were made of something else than now (or are damaged), and what changed."""
    checksums: dict[str, str] = {}
    present = Present()

    def data_of(job: Job) -> str:
        tree = job.config.tree()
        seed = data_seed(job.config, job.seed)
        key = json.dumps([tree["data"], tree["partition"], seed])
        if key not in checksums:
            checksums[key] = content_of(job.config, load_dataset(job.config, seed)).checksum
        return checksums[key]

    found = [(job, changed_since(job.folder(out), job.config, partial(data_of, job), present)) for job in jobs]
    for job, changes in found:
        if job.is_finished(out):
            changes += changed_batches(job.folder(out), job.config)
    return [(job, changes) for job, changes in found if changes or (damaged_too and _is_damaged(job.folder(out)))]


def _is_damaged(folder: Path) -> bool:
    try:
        return any(not read_runs(path.parent) for path in folder.rglob("rounds.jsonl"))
    except FedskewError:
        return True


def _say_stale(stale: Sequence[tuple[Job, Sequence[str]]], jobs: int, out: Path) -> str:
    first = stale[0][0]
    changes = dict.fromkeys(change for _, changes in stale for change in changes)
    return (
        f"since {len(stale)} of these {jobs} runs, {' and '.join(changes)} (such as {first.name}, in "
        f"{first.folder(out)}); train them anew with --fresh, which keeps the old folders, or write elsewhere with "
        "--out"
    )


def _refused(jobs: Sequence[Job], anew: Sequence[Job], out: Path) -> dict[tuple[str, int], FedskewError]:
    """Set up every cell for its first seed, and return the errors of those that can't be set up.

    Where an error is that of a seed alone, the cell's next seed is tried.

    Cells of one task come together, so that a data set is loaded once, and only one is in memory.

    Args:
        jobs: The jobs.
        anew: Those of them that start over, whatever is in their folders.
        out: The folder that these are in.

    Raises:
        FedskewError: What no other cell could do without: data or a package are missing.
    """

    def task_of(job: Job) -> str:
        tree = job.config.tree()
        return json.dumps([tree["data"], tree["partition"], tree["target"], job.seed])

    refused: dict[tuple[str, int], FedskewError] = {}
    waiting = {job.cell.label: [one for one in jobs if one.cell.label == job.cell.label] for job in jobs}
    while waiting:
        first = sorted((of_cell[0] for of_cell in waiting.values()), key=task_of)
        for _, cells in itertools.groupby(first, task_of):
            task = None
            for job in cells:
                of_cell = waiting.pop(job.cell.label)
                try:
                    task = task or make_task(job.config, job.seed)
                    folder = job.folder(out)
                    place = folder.with_name(f"{folder.name}.new") if job in anew else folder
                    try_out(job.config, job.seed, place, task)
                except PartitionError as error:
                    refused[job.key] = error
                    if of_cell[1:]:
                        waiting[job.cell.label] = of_cell[1:]
                except (ConfigError, ArgumentError) as error:
                    refused |= {one.key: error for one in of_cell}
                except FedskewError as error:
                    raise type(error)(f"cell {job.cell.label!r}: {error}") from None
    return {job.key: refused[job.key] for job in jobs if job.key in refused}


def _default_processes(configs: Sequence[Config]) -> int:
    if any(choose_device(config.engine.device).type == "cuda" for config in configs):
        return 1
    engines = [config.engine for config in configs]
    return max(1, cores() // max((engine.threads * engine.number_of_processes() for engine in engines), default=1))
