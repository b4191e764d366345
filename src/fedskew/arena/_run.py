"""Runs an arena: trains what is missing of it, on any executor, and keeps it as lines of CSV files in its folder.

What trains on a worker (`train`) takes configs in plain values, and returns a row of texts for each seed.
"""

from __future__ import annotations

import csv
import io
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedskew import Result, errors, methods, simulate
from fedskew.arena._advice import figures, local_epochs
from fedskew.arena._arena import Arena
from fedskew.arena._plan import ArenaJob, Line, Plan, sharing
from fedskew.engine import Evaluation
from fedskew.errors import reason_of
from fedskew.experiment import Config, resolve, shared_data, simulate_together
from fedskew.files import append, locked, write_text, writing
from fedskew.labels import as_target
from fedskew.report import SeedRun
from fedskew.tables import csv_text

FIGURES = (
    *("score", "accuracy", "worst_class", "target_accuracy", "validation", "curve"),
    *("steps", "megabytes", "finish_megabytes", "finish_clients", "seconds", "diverged", "made", "failure"),
)
"""Columns of a run's results.

Accuracies are shares from 0 to 1, means over the last evaluations. `score` is the accuracy on the target mix, or
`accuracy` where there is none. `curve`: the score of each evaluation in hundredths of a percent. `steps`: local steps
in units of FedAvg's, so that a step with a further pass counts for more. `megabytes`: up and down, the finish's
included, which `finish_megabytes` and `finish_clients` tell apart; empty without a finish, whose one evaluation is of
the last round's model. `made`: version and revision of fedskew.
`failure`: why this config can't be trained; all other columns are empty then.
"""
AT_CLIENTS = ("common", "personal")
"""Further columns where clients have test samples of their own: mean over clients of the accuracy on these."""


@dataclass(frozen=True)
class Trained:
    """What became of one config, as texts: its rows by seed, and the federation's figures.

    Where it could not be trained this time there are no rows, and `failed` says why.
    """

    rows: dict[int, dict[str, str]]
    federation: dict[str, str]
    failed: str = ""


Tree = Mapping[str, Any]
_figures = lru_cache(maxsize=64)(figures)  # many runs have one federation


def train(trees: Sequence[tuple[Tree, Sequence[Tree]]], last: int) -> list[list[Trained]]:
    """Train the seeds of some configs, and return the results in each one's views; nothing is written.

    A view is the config with a label mix of the target, by which the models are scored. Several configs, which have
    `engine.seeds_together`, train as one cohort where they can; where one of them fails in training, each is trained
    alone. A result is the mean of the `last` evaluations.
    """
    with shared_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.BackendWarning)
        warnings.simplefilter("ignore", errors.DataWarning)
        if len(trees) > 1:
            try:
                results = simulate_together([_whole(resolve(tree)) for tree, _ in trees])
            except Exception as error:
                logging.getLogger(__name__).debug("trained one after another, as one of them failed: %s", error)
            else:
                return [_seen(own, result, last) for (_, own), result in zip(trees, results, strict=True)]
        return [_train_alone(tree, views, last) for tree, views in trees]


def _whole(config: Config) -> Config:
    """Return a config whose seeds have every client once for each of its own, where clients train alone."""
    if config.partition.baseline != "alone":
        return config
    if config.partition.clients is None:
        raise errors.ConfigError("partition.clients: missing, and each of them trains alone; set their number")
    clients = config.partition.clients - config.has_target_client
    return config.model_copy(update={"seeds": [seed * clients + at for seed in config.seeds for at in range(clients)]})


def _mean_row(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the mean of the rows of clients that train alone; steps, seconds and what diverged are sums."""
    shares = ("score", "accuracy", "worst_class", "target_accuracy", "validation")
    means = {name: _mean(float(row[name]) for row in rows if row[name]) for name in shares}
    sums = {name: f"{sum(float(row[name]) for row in rows):.10g}" for name in ("steps", "seconds", "diverged")}
    curves = zip(*(map(int, row["curve"].split()) for row in rows), strict=False)  # who stops early ends all
    return {**rows[0], **means, **sums, "curve": " ".join(f"{fmean(own):.0f}" for own in curves)}


def _train_alone(tree: Tree, views: Sequence[Tree], last: int) -> list[Trained]:
    try:
        config = _whole(resolve(tree))
    except errors.FedskewError as error:
        return [Trained({}, {}, str(error)) for _ in views]
    try:
        return _seen(views, simulate(config, progress=False), last)
    except Exception as error:
        return _seen(views, error, last)


def _seen(views: Sequence[Tree], result: Result | Exception, last: int) -> list[Trained]:
    """Return what became of a training in each of its views."""
    found = []
    for config in map(resolve, views):
        try:
            found.append(_outcome(config, result, last))
        except errors.ArgumentError as error:  # a mix that doesn't fit
            found.append(_outcome(config, error, last))
    return found


def _outcome(config: Config, result: Result | Exception, last: int) -> Trained:
    if isinstance(result, Result):
        first = result.runs[0]
        target = first.target
        if target is None and isinstance(config.target.mix, list):
            target = as_target(config.target.mix, len(first.counts[0]), "target.mix", written=True)
        federation = federation_of(config, first.counts, target)
        runs = [_towards(run, target) for run in result.runs] if first.target is None else result.runs
        rows = [_row(config, run, last) for run in runs]
        each = len(rows) // len(config.seeds)
        parts = zip(config.seeds, range(0, len(rows), each), strict=True)
        of_seed = {seed: _mean_row(rows[at : at + each]) if each > 1 else rows[at] for seed, at in parts}
        return Trained(of_seed, {} if config.partition.baseline else federation)
    if isinstance(result, (errors.PartitionError, errors.ConfigError, errors.ArgumentError)):  # it would fail again
        nothing = dict.fromkeys(FIGURES, "")
        return Trained({seed: nothing | {"failure": f"refused: {result}"} for seed in config.seeds}, {})
    return Trained({}, {}, reason_of(result))


def _towards(run: SeedRun, target: NDArray[np.float64] | None) -> SeedRun:
    """Return a run as if its models had been evaluated for a target with this label mix; None: as it is."""

    def scored(one: Evaluation) -> Evaluation:
        confusion = np.array(one.confusion, dtype=np.int64)
        return replace(one, target_accuracy=Evaluation.of(confusion, 0.0, target).target_accuracy)

    if target is None:
        return run
    both = [(record, record.evaluation, record.validation) for record in run.rounds]
    rounds = [replace(one, evaluation=test and scored(test), validation=own and scored(own)) for one, test, own in both]
    summary = dict(run.summary)
    if said := (finished := summary.get("finished") or {}).get("evaluation"):
        summary["finished"] = {**finished, "evaluation": asdict(scored(Evaluation.from_dict(said)))}
    return replace(run, rounds=rounds, summary=summary)


def federation_of(config: Config, counts: Iterable[Iterable[int]], target: Iterable[float] | None) -> dict[str, str]:
    """Return a federation in words, and the figures by which it is compared with others, as texts."""
    training, rows = config.training, tuple(map(tuple, counts))
    epochs = local_epochs(training.model_dump(), sum(map(sum, rows)) / len(rows))
    found = _figures(rows, None if target is None else tuple(target), training.participation, epochs)
    return {"federation": _in_words(config)} | {name: f"{value:.6g}" for name, value in found.items()}


def _in_words(config: Config) -> str:
    rule, data = config.partition, config.data
    name = Path(data.root or "").stem if data.name == "npz" else data.name
    repeated = ("min_size", "max_tries")  # how often shares are drawn
    options = {**{key: value for key, value in rule.parameters.items() if key not in repeated}, "clients": rule.clients}
    said = ", ".join(f"{name} {value}" for name, value in options.items() if not isinstance(value, bool | None))
    training = config.training
    local = f"epochs {training.epochs:g}" if training.steps is None else f"steps {training.steps}"
    share = f"{training.participation:.0%} a round, {local}"
    aim = "" if config.target.mix is None else ", for a target mix"
    return f"{name}, {rule.rule} ({said}), {share}{aim}"


def _row(config: Config, trained: SeedRun, last: int) -> dict[str, str]:
    run, summary = SeedRun.with_finished([trained])[-1], trained.summary
    said = summary.get("finished") or {}
    finish = said if said.get("evaluation") else {}  # one that failed made no other model
    evaluations = [one.evaluation for one in run.rounds if (one.round or finish) and one.evaluation is not None]
    validations = [record.validation for record in trained.rounds if record.round and record.validation is not None]
    end = evaluations[-last:]
    cost = methods.cost(methods.build(config.method, config.training.momentum))
    steps = sum(sum(record.steps) for record in run.rounds) * (3 + cost.forward + 2 * cost.backward) / 3
    return {
        "score": _mean(one.score for one in end),
        "accuracy": _mean(one.accuracy for one in end),
        "worst_class": _mean(one.worst_class for one in end),
        "target_accuracy": _mean(one.target_accuracy for one in end),
        "validation": _mean(one.score for one in validations[-last:]),
        "curve": " ".join(f"{10_000 * one.score:.0f}" for one in evaluations),
        "steps": f"{steps:.0f}",
        "megabytes": "0" if config.partition.baseline else _megabytes(run.summary),
        "finish_megabytes": _megabytes(finish) if finish else "",
        "finish_clients": str(finish.get("clients", "")),
        "seconds": f"{summary['seconds']:.2f}",
        "diverged": str(summary["diverged"]),
        "made": "+".join(filter(None, [summary["versions"]["fedskew"], (summary["revision"] or "")[:7]])),
        "failure": "",
        **{row: _mean(one.accuracy for one in trained.sites if one.row == row) for row in AT_CLIENTS if trained.sites},
    }


def _megabytes(spent: Mapping[str, Any]) -> str:
    return f"{(spent['bytes_up'] + spent['bytes_down']) / 1e6:.4g}"


def _mean(values: Iterable[float | None]) -> str:
    """Return the mean of shares as text; empty where there are none."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.5f}" if known else ""


OF_FEDERATION = "of:"
"""Prefix of the columns of a federation's figures, since an axis may have the same name as one of them."""

_AHEAD = 2  # calls submitted for each that can run, so that workers need not wait for this process
_RUN = ("stage", "partition", "seed", "lr", "own", "config")
_CELLS = dict.fromkeys({"lr", *FIGURES} - {"made", "failure"}, re.compile(r"(-?\d+(\.\d+)?(e[-+]\d+)?)?"))
_CELLS |= {"stage": re.compile("tune|run|traffic"), "curve": re.compile(r"(-?\d+( -?\d+)*)?")}
_CELLS |= dict.fromkeys(("partition", "seed"), re.compile(r"\d+"))


class ArenaProgress(Protocol):
    """Callbacks of `run_arena`."""

    def begin(self, finished: int, runs: int) -> None:
        """Called once, before any run: how many are finished, of how many in all."""

    def ended(self, results: Sequence[tuple[ArenaJob, Trained]], runs: int) -> None:
        """Called when a call to the executor ends: its jobs, what became of each, how many fewer (or more) are left."""


@dataclass(frozen=True)
class ArenaState:
    """The state of an arena.

    Attributes:
        runs: The lines of `runs.csv` that belong to it, tuning runs included.
        federations: Figures of the federations, by the labels of the situation and the partition's seed.
        missing: For each method and training that lack runs, one of the missing jobs and how many at least.
        failures: Runs that failed this time, and why, a line each.
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
        files = _Files(arena, arena.folder(out), writes=False)
        return _state(arena, [Plan(arena, entry) for entry in arena.entries], files)


def run_arena(
    arena: Arena, out: Path, executor: Executor, at_once: int, progress: ArenaProgress | None = None
) -> ArenaState:
    """Train what is missing of an arena, in the folder of all runs.

    The runs of a call become lines of `runs.csv` when it ends. An arena that is started again trains only what is
    missing, whether it was stopped, has got further methods or situations, or is restricted by another `only`.

    `executor` is given a function of this package and plain values, and can run `at_once` calls at a time. RunError
    where the folder can't be written, or another process writes there.
    """
    folder = arena.folder(out)
    plans = [Plan(arena, entry) for entry in arena.entries]
    failures: dict[str, str] = {}
    failed: set[str] = set()
    with locked(folder):
        files = _Files(arena, folder, writes=True)
        if progress is not None:
            state = _state(arena, plans, files)
            progress.begin(len(state.runs), state.number)
        left = sharing(plans)
        waiting: dict[int, list[list[ArenaJob]]] = {}  # by group, the calls of its step that are not submitted yet
        under_way: dict[Future[list[list[Trained]]], tuple[int, list[list[ArenaJob]]]] = {}  # each job with its views

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
                views = [job.views(arena.entries) for job in call[1]]
                trees = [(own[0].trained.tree(), [view.config.tree() for view in own]) for own in views]
                under_way[executor.submit(train, trees, arena.settings.last)] = call[0], views
            if not under_way:
                return _state(arena, plans, files, failures)
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                at, views = under_way.pop(future)
                reason = future.exception()
                if reason is not None and len(views) > 1:  # its process ended, and which run did it is unknown
                    waiting[at] += [own[:1] for own in views]
                    continue
                trained = future.result() if reason is None else [[Trained({}, {}, reason_of(reason))] * len(views[0])]
                pairs = [pair for own in map(zip, views, trained) for pair in own]
                results = [(job, one) for job, one in pairs if not job.is_done(files.runs)]
                before = sum(plan.left(files.runs) for plan in left[at])
                files.add(results)
                for job, result in results:
                    if result.failed:
                        failures[job.name] = result.failed
                        failed.update(job.keys.values())
                if progress is not None:
                    progress.ended(results, before - sum(plan.left(files.runs) for plan in left[at]))


def _state(arena: Arena, plans: Sequence[Plan], files: _Files, failures: Mapping[str, str] | None = None) -> ArenaState:
    runs: list[Line] = []
    missing: list[tuple[ArenaJob, int]] = []
    for plan in plans:
        own = {**plan.entry.situation, "method": plan.entry.method}  # methods with the same config share its runs
        runs += [files.runs[key] | own for key in plan.finished(files.runs)]
        if jobs := plan.missing(files.runs):
            missing.append((jobs[0], plan.left(files.runs)))
    ordered = tuple(sorted(runs, key=lambda line: line["stage"] != "tune"))
    failed = tuple(f"{name}: {reason}" for name, reason in (failures or {}).items())
    number = len(runs) + sum(left for _, left in missing)
    once = {(job.entry.method, job.entry.training): (job, left) for job, left in sorted(missing, key=itemgetter(1))}
    return ArenaState(arena, ordered, files.federations, tuple(once.values()), failed, number)


class _Files:
    """`runs.csv` and `federations.csv`: one line for each run and each federation, added whole and never changed."""

    def __init__(self, arena: Arena, folder: Path, writes: bool) -> None:
        self._axes = arena.axes
        self._runs_file, self._federations_file = folder / "runs.csv", folder / "federations.csv"
        tested = any(entry.config.data.client_test for entry in arena.entries)
        self._figures = (*FIGURES, *(AT_CLIENTS if tested else ()))
        columns = "method", *_RUN, *self._figures
        if (axis := next((axis for axis in arena.axes if axis in columns), None)) is not None:
            raise errors.ConfigError(
                f"sweep.grid: the axis {axis!r} has the name of a column of runs.csv; name it otherwise, as "
                f"own-{axis} = [{{label = ..., set = ...}}, ...]"
            )
        lines = _read(self._runs_file, [*arena.axes, *columns], writes)
        self.runs = {line["config"]: line for line in lines}
        lines = _read(self._federations_file, [*arena.axes, "partition"], writes)
        self.federations = {self._key(line): line for line in lines}

    def add(self, trained: Sequence[tuple[ArenaJob, Trained]]) -> None:
        """Add the runs of some jobs, and their federations if they are new, all at once."""
        runs: list[dict[str, str]] = []
        federations: list[dict[str, str]] = []
        for job, result in trained:
            config, situation = job.config, job.entry.situation
            partition = str(config.partition.seed)
            for seed, row in result.rows.items():
                own = [job.stage, partition, str(seed), f"{config.training.lr:g}", job.own, job.keys[seed]]
                line = {**situation, "method": job.entry.method, **dict(zip(_RUN, own, strict=True))}
                runs.append({**line, **dict.fromkeys(self._figures, ""), **row})
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


def _read(path: Path, columns: Sequence[str], writes: bool) -> list[dict[str, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise errors.RunError(f"{path}: can't be read: {error}; move it away, or write elsewhere with --out") from None
    whole = text[: text.rfind("\n") + 1]
    if writes and whole != text:  # the last line was being written when the machine or its power failed
        write_text(path, whole)
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    header, names = list(reader.fieldnames or []), ",".join(columns)
    if whole and header[: len(columns)] != list(columns):
        other = f"belongs to an arena with other columns than {names}; write elsewhere with --out, or rename this arena"
        gone = f"its header is missing, a first line that begins with {names}; put it back"
        raise errors.RunError(f"{path}: {other if {*header} & {*columns} else gone}")
    lines = []
    for line in reader:
        if (wrong := _wrong(line)) is not None:
            raise errors.RunError(f"{path}, line {reader.line_num}: {wrong}; mend it, or move the file away")
        lines.append(line)
    return lines


def _wrong(line: Mapping[str | None, str | None]) -> str | None:
    if None in line or None in line.values():
        return "it has too few or too many cells"
    for name, cell in line.items():
        if name in _CELLS and not _CELLS[name].fullmatch(cell or ""):
            return f"its {name} can't be {cell!r}"
    return None


def _add(path: Path, lines: Sequence[Line]) -> None:
    if not lines:
        return
    head = [] if path.exists() and path.stat().st_size else [list(lines[0])]
    with writing(path):
        append(path, csv_text([*head, *(list(line.values()) for line in lines)]).encode())
