"""Run a sweep: what is missing of it, several runs at a time, and then its tables."""

import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from fedskew import executors
from fedskew.errors import ArgumentError, ConfigError, FedskewError, PartitionError, RunError, in_one_line, reason_of
from fedskew.executors import cores
from fedskew.experiment._config import Config, resolve
from fedskew.experiment._folder import RunFolder
from fedskew.experiment._grid import Cell, Sweep
from fedskew.experiment._identity import Present, keep_data, set_aside, shared_data
from fedskew.experiment._setup import choose_device, try_out
from fedskew.experiment._simulate import is_finished, run_config
from fedskew.experiment._sweep_tables import SweepResult, refused_cells
from fedskew.experiment._task import make_task
from fedskew.files import locked
from fedskew.report import SeedRun
from fedskew.tables import grouped


@dataclass(frozen=True)
class Job:
    """One seed of one cell, which is a run by itself."""

    cell: Cell
    seed: int

    @cached_property
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
        """Return the job's run folder, in the folder of all of them."""
        return self.config.folder(out)

    def is_finished(self, out: Path) -> bool:
        """Return whether the run is finished, in the folder of all of them."""
        return is_finished(self.folder(out))

    @staticmethod
    def of(sweep: Sweep) -> "list[Job]":
        """Return every seed of every cell, in order."""
        return [Job(cell, seed) for cell in sweep.cells for seed in cell.config.seeds]

    @staticmethod
    def configs(jobs: "Sequence[Job]") -> list[Config]:
        """Return the config of each cell that some jobs are of, with the seeds of these jobs."""
        cells = grouped(jobs, lambda job: job.cell.label).values()
        return [own[0].cell.config.model_copy(update={"seeds": [job.seed for job in own]}) for own in cells]


class SweepProgress(Protocol):
    """Callbacks of `run_sweep`."""

    def refused(self, label: str, reason: str) -> None:
        """Called before `begin` for each cell that can't be run, while others can."""

    def moved(self, folders: Sequence[Path]) -> None:
        """Called before `begin` where runs that are trained anew were moved aside: where they are now."""

    def begin(self, jobs: Sequence[Job], finished: int) -> None:
        """Called once, before any run: the runs to do, and how many others were finished before."""

    def round(self, job: Job, round: int, accuracy: float | None) -> None:
        """Called after each round, also those of a resumed run, with its test accuracy, where it was evaluated."""

    def ended(self, job: Job, failure: str | None, accuracy: float | None) -> None:
        """Called after each run: why it failed, if it did, and the accuracy that stands for it, if there is one."""


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
        out: Where run folders and the sweep's own folder go.
        processes: How many runs at a time; by default as many as the cores allow, and one on a GPU.
        fresh: Train anew what was made by other code, of other data or by another version of fedskew, or is damaged;
            such folders are moved to `earlier/`. Without it these are a RunError.
        executor: Where runs are trained, in place of processes of this machine; its workers share `out` with it.
    """
    out = Path(out)
    if processes is not None and processes < 1:
        raise ArgumentError(f"processes: must be at least 1, not {processes}")
    jobs = Job.of(sweep)
    with ExitStack() as held:
        with shared_data():
            stale = _stale(jobs, out, damaged_too=fresh)
            if stale and not fresh:
                raise RunError(_stale_in_words(stale, len(jobs), out))
            anew = [job for job, _ in stale]
            missing = [job for job in jobs if job in anew or not job.is_finished(out)]
            errors = _refused(missing, anew, out)
            if len(errors) == len(jobs):
                error = next(iter(errors.values()))
                raise type(error)(f"cell {jobs[0].cell.label!r}: {error}")
            refused = {key: str(error) for key, error in errors.items()}
            to_run = [job for job in missing if job.key not in refused]
            held.enter_context(locked(sweep.folder(out)))
            moved = _set_aside(anew, out)
            if progress is not None:
                if moved:
                    progress.moved(moved)
                for label, reason in refused_cells(sweep, refused).items():
                    progress.refused(label, reason)
                progress.begin(to_run, len(jobs) - len(missing))
        failed = _train(to_run, out, processes, progress, executor)
        runs: list[SeedRun] = []
        for job in jobs:
            if job.is_finished(out):
                try:
                    runs += _runs_of(job, out)
                except FedskewError as error:
                    failed[job.key] = str(error)
        result = SweepResult.of(sweep, runs, out, failed, refused)
        result.write_tables()
        result.write_report()
        return result


Round = tuple[int, float | None]
"""A round that a run has ended, and the test accuracy where it was evaluated."""


def _train(
    jobs: Sequence[Job], out: Path, processes: int | None, progress: SweepProgress | None, pool: Executor | None
) -> dict[tuple[str, int], str]:
    """Run jobs, each in its folder, from its checkpoint where it has one, and return why some failed."""
    place = out.resolve()
    reasons: dict[int, str] = {}
    events: SimpleQueue[tuple[int, Round | Future[Any]]] = SimpleQueue()
    with ExitStack() as stack:
        if pool is None:
            pool, _ = stack.enter_context(executors.executor(processes or _default_processes(jobs), hear=events.put))
        under_way = [pool.submit(train_run, number, job.config.tree(), place) for number, job in enumerate(jobs)]
        for number, future in enumerate(under_way):
            future.add_done_callback(lambda future, number=number: events.put((number, future)))  # type: ignore[misc]
        left = len(jobs)
        try:
            while left:
                number, event = events.get()
                job = jobs[number]
                rounds, failure = ([event], None) if isinstance(event, tuple) else _result(event)
                if progress is not None:
                    for round, accuracy in rounds:
                        progress.round(job, round, accuracy)
                if isinstance(event, tuple):
                    continue
                left -= 1
                if failure is None and not job.is_finished(out):
                    failure = f"its worker wrote to another {place}: give a folder that all workers share with this one"
                if failure is not None:
                    reasons[number] = failure
                if progress is not None:
                    progress.ended(job, failure, None if failure is not None else _accuracy_of(job, out))
        finally:
            for future in under_way:
                future.cancel()
    return {jobs[number].key: reasons[number] for number in sorted(reasons)}


def _result(future: Future[tuple[list[Round], str | None]]) -> tuple[list[Round], str | None]:
    try:
        return future.result()
    except Exception as error:  # its process was killed, or worker after worker of a cluster
        return [], reason_of(error)


def train_run(number: int, tree: Mapping[str, Any], out: Path) -> tuple[list[Round], str | None]:
    """Run one config, from its checkpoint where it has one; return rounds not yet reported, and why it failed."""
    rounds: list[Round] = []
    keep_data()

    def listen(record: Mapping[str, Any]) -> None:
        evaluation = record["evaluation"]
        ended = record["round"], None if evaluation is None else evaluation["accuracy"]
        if not executors.report((number, ended)):
            rounds.append(ended)

    try:
        config = resolve(tree)
        run_config(config, config.folder(out), resume=True, progress=listen, scripts=out)
    except FedskewError as error:
        return rounds, str(error)
    except Exception as error:
        again = f"fedskew --debug run {Config.model_validate(tree).folder(out)}/config.toml --resume"
        return rounds, f"{in_one_line(error)} (for the traceback: {again} --out {out})"
    return rounds, None


def _default_processes(jobs: Sequence[Job]) -> int:
    engines = [job.cell.config.engine for job in jobs]
    if any(choose_device(engine.device).type == "cuda" for engine in engines):
        return 1
    return max(1, cores() // max((engine.threads * engine.number_of_processes() for engine in engines), default=1))


def _runs_of(job: Job, out: Path) -> list[SeedRun]:
    """Read a finished run, whose headline figures are those that the sweep asks for now."""
    found, evaluation = RunFolder.read_runs(job.folder(out), job.cell.label), job.config.evaluation
    return [run.summarised(evaluation.summary, measure=evaluation.measure) for run in found]


def _accuracy_of(job: Job, out: Path) -> float | None:
    """Return the accuracy that stands for a finished run; None where there is none, or it can't be read."""
    with suppress(FedskewError):
        return next((run.headline.get("accuracy") for run in _runs_of(job, out)), None)
    return None


def _set_aside(jobs: Sequence[Job], out: Path) -> list[Path]:
    """Move the folders of runs that start over aside, and return where they are."""
    for job in jobs:
        with locked(job.folder(out)):
            pass  # what another process is at work on stays where it is
    return [place for job in jobs if (place := set_aside(job.folder(out))) is not None]


def _stale(jobs: Sequence[Job], out: Path, damaged_too: bool) -> list[tuple[Job, list[str]]]:
    """Return the runs in the folders that were made of something else than now (or are damaged), and what changed."""
    present = Present()
    found = [(job, present.changes(job.folder(out), job.config)) for job in jobs]
    return [(job, changes) for job, changes in found if changes or (damaged_too and _is_damaged(job.folder(out)))]


def _is_damaged(folder: Path) -> bool:
    with suppress(FedskewError):
        return any(not RunFolder.read_runs(path.parent) for path in folder.rglob("rounds.jsonl"))
    return True


def _stale_in_words(stale: Sequence[tuple[Job, Sequence[str]]], jobs: int, out: Path) -> str:
    first = stale[0][0]
    changes = dict.fromkeys(change for _, changes in stale for change in changes)
    return (
        f"since {len(stale)} of these {jobs} runs, {' and '.join(changes)} (such as {first.name}, in "
        f"{first.folder(out)}); train them anew with --fresh, which keeps the old folders, or write elsewhere with "
        "--out"
    )


def _refused(jobs: Sequence[Job], anew: Sequence[Job], out: Path) -> dict[tuple[str, int], FedskewError]:
    """Set up every cell for its first seed (the next where an error is of that alone); return errors by seed. Jobs of
    one task come together, so that only one data set is in memory; a lack of data or packages stops all."""

    def task_of(job: Job) -> str:
        tree = job.config.tree()
        return json.dumps([tree["data"], tree["partition"], tree["target"], job.seed])

    refused: dict[tuple[str, int], FedskewError] = {}
    settled: set[str] = set()  # cells that are known to be set up, or not to be
    for _, alike in itertools.groupby(sorted(jobs, key=task_of), task_of):
        task = None
        for job in alike:
            label, folder = job.cell.label, job.folder(out)
            if label in settled:
                continue
            try:
                task = task or make_task(job.config, job.seed)
                try_out(job.config, job.seed, folder.with_name(f"{folder.name}.new") if job in anew else folder, task)
                settled.add(label)
            except PartitionError as error:
                refused[job.key] = error
            except (ConfigError, ArgumentError) as error:
                refused |= {one.key: error for one in jobs if one.cell.label == label and one.key not in refused}
                settled.add(label)
            except FedskewError as error:
                raise type(error)(f"cell {label!r}: {error}") from None
    return {job.key: refused[job.key] for job in jobs if job.key in refused}
