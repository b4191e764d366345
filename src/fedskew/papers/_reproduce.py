"""Run the rows of a recipe, and compare them with what the paper prints."""

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedskew.errors import CombinationError, DataError
from fedskew.experiment import Cell, Config, Job, RefusedCell, RunFolder, Sweep, SweepProgress, SweepResult, run_sweep
from fedskew.files import write_text
from fedskew.papers._published import Printed
from fedskew.papers._recipe import Labels, Recipe, RecipeRow
from fedskew.papers._values import BASELINE, DRAWN, ceiling, domain_accuracies, in_words, paired, unit_of, value_of
from fedskew.report import SeedRun
from fedskew.tables import Spread, csv_text, flatten, markdown_table

_UNREPORTED = ("data.root", "engine.", "output.", "name")  # keys of a config that do not change the task

Table = tuple[list[str], list[list[str]], int]
"""Headings, cells, and how many columns from the left are labels."""


@dataclass(frozen=True)
class Comparison:
    """One line of a reproduction: its label on each axis, our value for each seed, what the paper prints, if anything;
    of values on a target's label mix, by seed, the most that can be had, in percent (`ceilings`)."""

    labels: Labels
    ours: Mapping[int, float]
    theirs: Printed | None
    ceilings: Mapping[int, float] = field(default_factory=dict)

    @property
    def spread(self) -> Spread:
        """Mean and standard deviation of ours over seeds."""
        return Spread.of(self.ours.values())

    @property
    def difference(self) -> float | None:
        """Ours minus theirs; None where one of them is missing."""
        mean = self.spread.mean
        return None if mean is None or self.theirs is None else mean - self.theirs.mean


@dataclass
class Reproduction:
    """The result of `reproduce`: a line for each row, written to files in a folder.

    Notes say how to read it, what was made smaller, and what deviates from the paper. There is a line for each run that
    failed, and for each row that was not run, as it makes no sense or can't be set up.
    """

    recipe: Recipe
    lines: list[Comparison]
    notes: list[str]
    failures: tuple[str, ...]
    refused: tuple[str, ...]
    folder: Path
    files: list[Path] = field(default_factory=list)

    @property
    def axes(self) -> list[str]:
        """The axes that its lines have a label on."""
        return [axis for axis in self.recipe.axes if any(axis in line.labels for line in self.lines)]

    @property
    def seeds(self) -> list[int]:
        """The seeds that a line has a value for."""
        return sorted({seed for line in self.lines for seed in line.ours})

    def table(self) -> Table:
        """Return ours, theirs and the difference as a person reads them.

        Axes on which all lines agree are left out, and so are the paper's columns where it prints nothing.
        """
        axes, unit = self._telling(), unit_of(self.recipe.measure)
        printed = any(line.theirs is not None for line in self.lines)
        body = []
        for line in self.lines:
            cells = [*(line.labels.get(axis, "") for axis in axes), line.spread.text(2)]
            if printed:
                cells.append("" if line.theirs is None else Spread(line.theirs.mean, line.theirs.std).text(2))
                cells.append("" if line.difference is None else f"{line.difference:+.2f}")
            body.append(cells)
        suffix = f", {unit}" if unit else ""
        return [*axes, f"ours{suffix}", *([f"theirs{suffix}", "difference"] if printed else [])], body, len(axes)

    def by_seed(self) -> Table:
        """Return our values seed by seed.

        Where a target's label mix does not allow 100 %, the lines of one task follow its ceiling.
        """
        axes, seeds = self._telling(), self.seeds
        bounded = any(most < 100 for line in self.lines for most in line.ceilings.values())
        body: list[list[str]] = []
        shown: list[Labels] = []
        for line in self.lines:
            task = {axis: label for axis, label in line.labels.items() if axis != "method"}
            if bounded and task not in shown and line.ceilings:
                shown.append(task)
                alike = [other.ceilings for other in self.lines if task.items() <= other.labels.items()]
                lowest = {seed: min(own[seed] for own in alike if seed in own) for one in alike for seed in one}
                body.append(_row({**task, "method": "ceiling"}, axes, lowest, seeds))
            body.append(_row(line.labels, axes, line.ours, seeds))
        return [*axes, *(f"seed {seed}" for seed in seeds)], body, len(axes)

    def differences(self) -> Table:
        """Return every method's difference from FedAvg.

        Differences are of the same task and seed (of the same federation, mean over its seeds, where a task has
        several); the interval is that of their mean, by Student's t.
        """
        found = [] if self.recipe.relative else paired([(line.labels, line.ours) for line in self.lines])
        axes = [axis for axis in self._telling() if axis != DRAWN]
        body = []
        for one in found:
            ends = "-" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}"
            labels = [one.labels.get(axis, "") for axis in axes]
            body.append([*labels, f"{one.mean:+.2f}", ends, f"{one.ahead} of {len(one.differences)}"])
        return [*axes, "difference", "95 % interval", "ahead"], body, len(axes)

    def _telling(self) -> list[str]:
        """Return the axes on which lines differ; where none do, one to name them by."""
        axes = [axis for axis in self.axes if len({line.labels.get(axis) for line in self.lines}) > 1]
        return axes or (["method"] if "method" in self.axes else self.axes[:1])

    paired = staticmethod(paired)

    @staticmethod
    def compare(recipe: Recipe, runs: Sequence[tuple[RecipeRow, Sequence[SeedRun]]]) -> list[Comparison]:
        """Compare the values of a recipe's runs, the finished ones of each row, with what the paper prints.

        Returns a comparison for each printed value that has a run.
        """
        readings = [dict(zip(recipe.readings, one, strict=True)) for one in product(*recipe.readings.values())]
        values: dict[tuple[tuple[str, str], ...], tuple[dict[int, float], dict[int, float]]] = {}
        for row, seeds in runs:
            most = {run.seed: value for run in seeds if (value := ceiling(run, recipe.measure)) is not None}
            for reading in readings:
                found = {run.seed: value_of(run, recipe.measure, reading) for run in seeds}
                values[_key({**row.labels, **reading})] = {seed: x for seed, x in found.items() if x is not None}, most
        table, lines = recipe.printed, []
        for key, (ours, most) in values.items():
            labels = dict(key)
            if recipe.relative:
                basis = recipe.relative.get(labels["method"])
                if basis is None:
                    continue
                other, _ = values.get(_key({**labels, "method": basis}), ({}, {}))
                ours, most = {seed: value - other[seed] for seed, value in ours.items() if seed in other}, {}
            lines.append(Comparison(labels, ours, None if table is None else table.find(labels), most))
        return lines


def _row(labels: Labels, axes: Sequence[str], values: Mapping[int, float], seeds: Sequence[int]) -> list[str]:
    numbers = (f"{values[seed]:.2f}" if seed in values else "-" for seed in seeds)
    return [*(labels.get(axis, "") for axis in axes), *numbers]


def reproduce(
    recipe: Recipe,
    rows: Sequence[RecipeRow] | None = None,
    out: str | Path = "runs",
    *,
    changes: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    processes: int | None = None,
    fresh: bool = False,
    progress: SweepProgress | None = None,
    command: str = "",
) -> Reproduction:
    """Run the rows of a recipe, and compare the results with what the paper prints.

    Runs are ordinary run folders: finished ones are read, interrupted ones continue.

    Args:
        rows: Its rows to run, by default all.
        out: Where run folders and the folder of the comparison go.
        changes: Dotted keys of every config to change, and their values.
        rounds: No run has more rounds than these.
        processes, fresh, progress: As in `run_sweep`.
        command: The command line to write into the comparison; by default that of the whole recipe.

    Raises:
        ConfigError: A config can't be read, or none can be set up; nothing has been run then. The message has the row.
        DataError: The files of a data set are missing; nothing has been run then.
        PartitionError: The data of no row can be divided; nothing has been run then.
    """
    from fedskew.papers._figure import draw

    rows = recipe.rows if rows is None else tuple(rows)
    planned, without = _planned(recipe, rows, changes, rounds)
    _check_data(recipe, planned)
    cells: dict[str, Cell] = {}
    for row, config in planned:
        cells.setdefault(config.digest, Cell(row.name, _labels(recipe, row), config))
    command = command or shlex.join(["fedskew", "reproduce", recipe.name])
    result = run_sweep(
        Sweep(recipe.name, tuple(cells.values()), None, command, without), out, processes, progress, fresh
    )
    finished = {row.name: _finished(recipe, cells[config.digest], Path(out)) for row, config in planned}
    runs = [(row, finished.get(row.name, [])) for row in rows]
    single = list({id(run): run for _, found in runs for run in found}.values())
    lines = Reproduction.compare(recipe, runs)
    notes = [
        *_reading(recipe, lines),
        *_changes(recipe, rows, planned),
        *(f"Differs from the paper: {text}" for text in recipe.deviating(rows)),
        *SeedRun.label_notes(single),
        *SweepResult.model_notes(config for _, config in planned),
        *SeedRun.machine_notes(single),
        *(f"Missing, as it failed: {failure}" for failure in result.failures),
        *(f"Refused: {text}" for text in result.refused),
    ]
    done = Reproduction(recipe, lines, notes, result.failures, result.refused, result.folder)
    done.files = [*_write(done, command), *draw(recipe, runs, done.folder)]
    return done


def _labels(recipe: Recipe, row: RecipeRow) -> dict[str, str]:
    return {axis: row.labels.get(axis, "-") for axis in recipe.axes if axis not in recipe.readings}


def _planned(
    recipe: Recipe, rows: Sequence[RecipeRow], changes: Mapping[str, Any] | None, rounds: int | None
) -> tuple[list[tuple[RecipeRow, Config]], tuple[RefusedCell, ...]]:
    """Return the config of each row, and the rows whose components, as changed, don't go together."""
    planned, refused, errors = [], [], []
    for row in rows:
        try:
            planned.append((row, row.config(changes, rounds)))
        except CombinationError as error:
            errors.append(error)
            refused.append(RefusedCell(row.name, _labels(recipe, row), str(error).removeprefix(f"row {row.name!r}: ")))
    if errors and not planned:
        raise errors[0]
    return planned, tuple(refused)


def _check_data(recipe: Recipe, planned: Sequence[tuple[RecipeRow, Config]]) -> None:
    """Raise DataError where files of a data set are missing; the message names the rows that could be run."""
    missing: dict[str, str] = {}
    for row, config in planned:
        if place := row.missing(config.data.root):
            missing.setdefault(row.data, place)
    if not missing:
        return
    title, place = next(iter(missing.items()))
    others = dict.fromkeys(row.labels.get("dataset") for row, _ in planned if row.data not in missing)
    named = ",".join(filter(None, others))
    rest = f"; rows that can be run: --rows {named!r}" if named else ""
    known = os.environ.get("FEDSKEW_DATA") or any(config.data.root for _, config in planned)
    root = "" if known else "; set the folder of the data sets by --data-root or FEDSKEW_DATA"
    raise DataError(f"{recipe.name}: {title} is missing: there is no {place}{root}{rest}")


def _finished(recipe: Recipe, cell: Cell, out: Path) -> list[SeedRun]:
    found: list[SeedRun] = []
    for job in (Job(cell, seed) for seed in cell.config.seeds):
        if job.is_finished(out):
            found += RunFolder.read_runs(job.folder(out), cell.label)
            if "domain" in recipe.readings:
                found[-1].summary["final"]["domains"] = domain_accuracies(job.config, job.seed, job.folder(out))
    return found


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _reading(recipe: Recipe, lines: Sequence[Comparison]) -> Iterator[str]:
    """Yield how to read the columns."""
    what = in_words(recipe.measure)
    if recipe.relative:
        what = f"change of {what}, in points, against the same method with uniform selection"
    several = any(len(line.ours) > 1 for line in lines)
    spread = "mean ± standard deviation over seeds (ddof = 1)" if several else "one seed, so no spread is known"
    yield f"Ours: {what}; {spread}."
    theirs = recipe.printed
    if theirs is not None and any(line.theirs is not None for line in lines):
        yield f"Theirs, {theirs.source}: {theirs.metric}."
    else:
        yield "The paper prints no numbers for these rows."
    if any(not line.ours for line in lines):
        yield "-: no value, because the run failed or ended before that round."


def _changes(recipe: Recipe, rows: Sequence[RecipeRow], planned: Sequence[tuple[RecipeRow, Config]]) -> list[str]:
    """Return a note on what was changed from the recipe; empty where nothing was."""
    changes: dict[str, dict[str, None]] = {}
    for row, config in planned:
        before, after = flatten(row.config().tree()), flatten(config.tree())
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key) and not key.startswith(_UNREPORTED):
                text = f"{key} = {json.dumps(after.get(key))}"
                changes.setdefault(text, {})[json.dumps(before.get(key))] = None
    parts = [f"{len(rows)} of {len(recipe.rows)} rows"] if len(rows) < len(recipe.rows) else []
    parts += [f"{text} instead of {' or '.join(old)}" for text, old in changes.items()]
    return [f"Changed from the recipe: {'; '.join(parts)}."] if parts else []


def _write(done: Reproduction, command: str) -> list[Path]:
    """Write `comparison.csv`, `by_seed.csv` and `comparison.md`."""
    lines: list[list[Any]] = [[*done.axes, "seeds", "ours_mean", "ours_std", "theirs_mean", "theirs_std", "difference"]]
    single: list[list[Any]] = [[*done.axes, "seed", "ours", "ceiling"]]
    for line in done.lines:
        ours, theirs = line.spread, (None, None) if line.theirs is None else (line.theirs.mean, line.theirs.std)
        labels = [line.labels.get(axis, "") for axis in done.axes]
        lines.append([*labels, len(line.ours), ours.mean, ours.std, *theirs, line.difference])
        single += [[*labels, seed, value, line.ceilings.get(seed)] for seed, value in line.ours.items()]
    page = [f"# {done.recipe.paper}: {done.recipe.title}", "", f"    {command}", "", markdown_table(*done.table()), ""]
    several = len({line.labels.get(DRAWN) for line in done.lines}) > 1
    if len(done.seeds) > 1:
        page += ["## Seed by seed", "", markdown_table(*done.by_seed()), ""]
    if (found := done.differences())[1] and (len(done.seeds) > 1 or several):
        by = f"{DRAWN} and seed, intervals over {DRAWN}s" if several else "seed"
        page += [f"## Differences from {BASELINE}, paired by {by}", "", markdown_table(*found), ""]
    page += [*(f"- {note}" for note in done.notes), ""]
    files = {"comparison.csv": csv_text(lines), "by_seed.csv": csv_text(single), "comparison.md": "\n".join(page)}
    for name, content in files.items():
        write_text(done.folder / name, content)
    return [done.folder / name for name in files]
