"""Run the rows of a recipe, and set them beside what the paper prints."""

from __future__ import annotations

import csv
import io
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew.errors import ConfigError, RunError
from fedskew.experiment import Cell, Config, Job, SeedRun, Sweep, Watcher, flatten, read_runs, run_sweep
from fedskew.experiment._sweep_tables import model_notes
from fedskew.papers._datasets import check_data
from fedskew.papers._domains import domain_accuracies
from fedskew.papers._figure import draw
from fedskew.papers._measures import describe_measure, unit_of, value_of
from fedskew.papers._published import Printed, published
from fedskew.papers._recipe import Labels, Recipe, Row

_UNTOLD = ("data.root", "engine.", "output.", "seeds")  # changes of a config that are no smaller task


@dataclass(frozen=True)
class Line:
    """One line of the comparison. `ours`: value by seed; `theirs`: what the paper prints, None where nothing."""

    labels: Labels
    ours: Mapping[int, float]
    theirs: Printed | None

    @property
    def mean(self) -> float | None:
        """Of ours over seeds."""
        return statistics.fmean(self.ours.values()) if self.ours else None

    @property
    def std(self) -> float | None:
        """Of ours over seeds (ddof 1); None for fewer than two."""
        return statistics.stdev(self.ours.values()) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus theirs."""
        return None if self.mean is None or self.theirs is None else self.mean - self.theirs.mean


@dataclass(frozen=True)
class Reproduction:
    """Ours beside theirs. `notes`: how to read it and what was made smaller; `files`: what was written in `folder`."""

    recipe: Recipe
    axes: tuple[str, ...]
    unit: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    failures: tuple[str, ...]
    folder: Path
    files: tuple[Path, ...]


def plan(
    rows: Sequence[Row], changes: Mapping[str, Any] | None = None, rounds: int | None = None
) -> list[tuple[Row, Config]]:
    """Each row's config, changed; `rounds`: no run has more. Raises ConfigError naming the row."""
    if rounds is not None and rounds < 1:
        raise ConfigError(f"rounds: must be at least 1, not {rounds}")
    planned = []
    for row in rows:
        own = dict(changes or {})
        whole = row.tree["training"]["rounds"]
        if rounds is not None and rounds < whole:
            own["training.rounds"] = rounds
            pipeline = row.tree.get("method", {}).get("pipeline", {})
            if "encoder_rounds" in pipeline:  # both parts of FedConcat in proportion
                own["method.pipeline.encoder_rounds"] = max(1, pipeline["encoder_rounds"] * rounds // whole)
        planned.append((row, row.config(own)))
    return planned


def reproduce(
    recipe: Recipe,
    rows: Sequence[Row] | None = None,
    out: str | Path = "runs",
    *,
    changes: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    processes: int | None = None,
    watcher: Watcher | None = None,
    command: str = "",
) -> Reproduction:
    """Do what is missing of these rows (by default all) under `out`, and compare.

    Runs are ordinary run folders: finished ones are read, half ones go on. `changes`: dotted keys of every config;
    `rounds`: no run has more than these; `processes`: runs at a time, see `run_sweep`. `command`: what is noted down as
    what was typed.

    Raises ConfigError, DataError or PartitionError, naming the row, before anything is run.
    """
    rows = recipe.rows if rows is None else tuple(rows)
    planned = plan(rows, changes, rounds)
    check_data(recipe, planned)
    unique: dict[str, Cell] = {}
    for row, config in planned:
        labels = {axis: row.labels.get(axis, "-") for axis in recipe.axes if axis not in recipe.readings}
        unique.setdefault(config.hash, Cell(row.name, labels, config))
    sweep = Sweep(
        recipe.name, tuple(unique.values()), None, command or shlex.join(["fedskew", "reproduce", recipe.name])
    )
    result = run_sweep(sweep, out, processes, watcher)
    runs = [(row, _finished(recipe, unique[config.hash], Path(out))) for row, config in planned]
    lines = _lines(recipe, runs)
    notes = [
        *_reading(recipe, lines),
        *_smaller(recipe, rows, planned),
        *_deviations(recipe, rows),
        *model_notes(config for _, config in planned),
        *_origin(runs),
    ]
    folder = result.folder
    axes = tuple(axis for axis in recipe.axes if any(axis in line.labels for line in lines))
    done = Reproduction(recipe, axes, unit_of(recipe.measure), tuple(lines), tuple(notes), result.failures, folder, ())
    files = [*_write(done, sweep.command), *draw(recipe, runs, lines, folder)]
    return Reproduction(**{**vars(done), "files": tuple(files)})


def _finished(recipe: Recipe, cell: Cell, out: Path) -> list[SeedRun]:
    """The runs of a cell that came to their end."""
    found: list[SeedRun] = []
    for job in (Job(cell, seed) for seed in cell.config.seeds):
        if job.is_finished(out):
            found += read_runs(job.folder(out), cell.label)
            if "domain" in recipe.readings:
                found[-1].summary["final"]["domains"] = domain_accuracies(job.config, job.seed, job.folder(out))
    return found


def _lines(recipe: Recipe, runs: Sequence[tuple[Row, Sequence[SeedRun]]]) -> list[Line]:
    table = None if recipe.published is None else published(recipe.published)
    readings: list[Labels] = [{}]
    for axis, of_axis in recipe.readings.items():
        readings = [{**reading, axis: label} for reading in readings for label in of_axis]
    values: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for row, seeds in runs:
        for reading in readings:
            found = {run.seed: value_of(run, recipe.measure, reading) for run in seeds}
            values[_key({**row.labels, **reading})] = {seed: x for seed, x in found.items() if x is not None}
    lines = []
    for key, ours in values.items():
        labels = dict(key)
        if recipe.relative:
            basis = recipe.relative.get(labels["method"])
            if basis is None:
                continue
            other = values.get(_key({**labels, "method": basis}), {})
            ours = {seed: value - other[seed] for seed, value in ours.items() if seed in other}
        lines.append(Line(labels, ours, None if table is None else table.find(labels)))
    return lines


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _reading(recipe: Recipe, lines: Sequence[Line]) -> list[str]:
    """How to read the columns."""
    what = describe_measure(recipe.measure)
    if recipe.relative:
        what = f"change of {what}, in points, against the same method with uniform selection"
    several = any(len(line.ours) > 1 for line in lines)
    spread = "mean ± standard deviation over seeds (ddof = 1)" if several else "one seed, so no spread is known"
    notes = [f"Ours: {what}; {spread}."]
    if any(line.theirs is not None for line in lines):
        notes.append(f"Theirs, as printed: {published(str(recipe.published)).metric}.")
    else:
        notes.append("The paper prints no numbers for these rows.")
    if any(not line.ours for line in lines):
        notes.append("-: no value, because the run failed or ended before.")
    return notes


def _smaller(recipe: Recipe, rows: Sequence[Row], planned: Sequence[tuple[Row, Config]]) -> list[str]:
    """What was made smaller, or else, than the recipe says; empty where nothing was."""
    parts = []
    if len(rows) < len(recipe.rows):
        parts.append(f"{len(rows)} of {len(recipe.rows)} rows")
    changes: dict[str, dict[str, None]] = {}
    for row, config in planned:
        whole = row.config()
        if config.seeds != whole.seeds:
            changes.setdefault(f"seeds {_list(config.seeds)} instead of {_list(whole.seeds)}", {})
        before, after = flatten(whole.tree()), flatten(config.tree())
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key) and not key.startswith((*_UNTOLD, "name")):
                text = f"{key} = {json.dumps(after.get(key))}"
                changes.setdefault(text, {})[json.dumps(before.get(key))] = None
    parts += [f"{text} instead of {' or '.join(old)}" if old else text for text, old in changes.items()]
    return [f"Not the whole: {'; '.join(parts)}."] if parts else []


def _deviations(recipe: Recipe, rows: Sequence[Row]) -> list[str]:
    return [f"Differs from the paper: {text}" for text in recipe.deviating(rows)]


def _origin(runs: Sequence[tuple[Row, Sequence[SeedRun]]]) -> list[str]:
    """Machine, versions and seconds of the runs."""
    seeds = {id(run): run for _, found in runs for run in found}.values()
    lines = []
    origins: dict[str, float] = {}
    for run in seeds:
        key = json.dumps([run.summary["machine"], run.summary["versions"], run.summary["revision"]], sort_keys=True)
        origins[key] = origins.get(key, 0.0) + run.summary["seconds"]
    for key, seconds in origins.items():
        machine, versions, revision = json.loads(key)
        where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
        packages = ", ".join(f"{name} {number}" for name, number in versions.items())
        at = "" if revision is None else f", revision {revision[:10]}"
        lines.append(f"{where}, {machine['threads']} thread(s) a run, {seconds:,.0f} s of training; {packages}{at}.")
    return lines


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _write(done: Reproduction, command: str) -> list[Path]:
    """`comparison.csv` and `comparison.md`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*done.axes, "seeds", "ours_mean", "ours_std", "theirs_mean", "theirs_std", "difference"])
    for line in done.lines:
        theirs = (None, None) if line.theirs is None else (line.theirs.mean, line.theirs.std)
        cells = [line.labels.get(axis, "") for axis in done.axes]
        writer.writerow([*cells, len(line.ours), line.mean, line.std, *theirs, line.difference])
    headings, body, labels = text_lines(done)
    rule = ["---"] * labels + ["---:"] * (len(headings) - labels)
    table = ["| " + " | ".join(entries) + " |" for entries in [headings, rule, *body]]
    title = f"# {done.recipe.paper}: {done.recipe.title}"
    page = "\n".join([title, "", f"    {command}", "", *table, "", *(f"- {note}" for note in done.notes), ""])
    files = {"comparison.csv": text.getvalue(), "comparison.md": page}
    try:
        done.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (done.folder / name).write_text(content, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunError(f"{done.folder}: the comparison can't be written: {error.strerror}") from None
    return [done.folder / name for name in files]


def text_lines(done: Reproduction) -> tuple[list[str], list[list[str]], int]:
    """Headings and cells as a person reads them, and how many columns are labels.

    Axes on which all lines agree are left out, and so is what the paper prints where it prints nothing.
    """
    axes = [axis for axis in done.axes if len({line.labels.get(axis) for line in done.lines}) > 1]
    if not axes:
        axes = ["method"] if "method" in done.axes else list(done.axes[:1])
    unit = f", {done.unit}" if done.unit else ""
    printed = any(line.theirs is not None for line in done.lines)
    body = []
    for line in done.lines:
        cells = [*(line.labels.get(axis, "") for axis in axes), spread(line.mean, line.std)]
        if printed:
            cells.append("" if line.theirs is None else spread(line.theirs.mean, line.theirs.std))
            cells.append("" if line.difference is None else f"{line.difference:+.2f}")
        body.append(cells)
    values = [f"ours{unit}", *([f"theirs{unit}", "difference"] if printed else [])]
    return [*axes, *values], body, len(axes)


def spread(mean: float | None, std: float | None) -> str:
    """`mean ± std`."""
    if mean is None:
        return "-"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"
