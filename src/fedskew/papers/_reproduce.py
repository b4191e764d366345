"""Run the rows of a recipe, and compare them with what the paper prints."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedskew.errors import CombinationError, ConfigError, DataError, RunError
from fedskew.experiment import Cell, Config, Job, RefusedCell, Sweep, SweepProgress, model_notes, read_runs, run_sweep
from fedskew.papers._datasets import absent, facts_of
from fedskew.papers._figure import draw
from fedskew.papers._measures import ceiling, describe_measure, domain_accuracies, unit_of, value_of
from fedskew.papers._paired import BASELINE, DRAWN, paired
from fedskew.papers._published import Printed, published
from fedskew.papers._recipe import Labels, Recipe, RecipeRow
from fedskew.report import SeedRun, machine_notes
from fedskew.tables import Spread, csv_text, flatten, markdown_table

_UNREPORTED = ("data.root", "engine.", "output.", "seeds")  # keys of a config that do not change the task


@dataclass(frozen=True)
class Comparison:
    """One line of a reproduction: our values and the paper's.

    Attributes:
        labels: Its label on each axis.
        ours: Our value for each seed.
        theirs: What the paper prints; None where it prints nothing.
        ceilings: For values on a target's label mix, by seed: the most that can be had, in percent, as nobody learns
            a class that no client holds; empty for other values.
    """

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


@dataclass(frozen=True)
class Reproduction:
    """The result of `reproduce`.

    Attributes:
        recipe: The recipe.
        axes: The axes that its lines have a label on.
        unit: Unit of the values.
        lines: Our values and the paper's, a line for each row.
        notes: How to read it, what was made smaller, what deviates from the paper.
        failures: One line for each run that failed.
        refused: One line for each row that was not run, as it makes no sense or can't be set up.
        folder: Where the files are.
        files: What was written.
    """

    recipe: Recipe
    axes: tuple[str, ...]
    unit: str
    lines: tuple[Comparison, ...]
    notes: tuple[str, ...]
    failures: tuple[str, ...]
    refused: tuple[str, ...]
    folder: Path
    files: tuple[Path, ...]


def plan(
    rows: Sequence[RecipeRow], changes: Mapping[str, Any] | None = None, rounds: int | None = None
) -> list[tuple[RecipeRow, Config]]:
    """Return the config of each row, changed.

    Args:
        rows: The rows.
        changes: Dotted keys of every config to change, and their values.
        rounds: No run has more rounds than these.

    Raises:
        ConfigError: A config makes no sense; the message names the row.
    """
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
        recipe: The recipe.
        rows: Its rows to run, by default all.
        out: Where run folders and the folder of the comparison go.
        changes: Dotted keys of every config to change, and their values.
        rounds: No run has more rounds than these.
        processes: How many runs at a time, see `run_sweep`.
        fresh: Train anew what was made by other code or of other data, see `run_sweep`.
        progress: Callbacks, see `run_sweep`.
        command: The command line to write into the comparison; by default that of the whole recipe.

    Returns:
        The runs and the comparison.

    Raises:
        ConfigError: A config can't be read, or none can be set up; nothing has been run then. The message has the row.
        DataError: The files of a data set are missing; nothing has been run then.
        PartitionError: The data of no row can be divided; nothing has been run then.
    """
    rows = recipe.rows if rows is None else tuple(rows)
    planned, without = _planned(recipe, rows, changes, rounds)
    _check_data(recipe, planned)
    unique: dict[str, Cell] = {}
    for row, config in planned:
        unique.setdefault(_run_of(config), Cell(row.name, _labels(recipe, row), config))
    sweep = Sweep(
        recipe.name, tuple(unique.values()), None, command or shlex.join(["fedskew", "reproduce", recipe.name]), without
    )
    result = run_sweep(sweep, out, processes, progress, fresh)
    finished = {row.name: _finished(recipe, unique[_run_of(config)], Path(out)) for row, config in planned}
    runs = [(row, finished.get(row.name, [])) for row in rows]
    lines = compare(recipe, runs)
    notes = [
        *_reading(recipe, lines),
        *_changes(recipe, rows, planned),
        *(f"Differs from the paper: {text}" for text in recipe.deviating(rows)),
        *_label_notes(runs),
        *model_notes(config for _, config in planned),
        *machine_notes({id(run): run for _, found in runs for run in found}.values()),
        *(f"Missing, as it failed: {failure}" for failure in result.failures),
        *(f"Refused: {text}" for text in result.refused),
    ]
    folder = result.folder
    axes = tuple(axis for axis in recipe.axes if any(axis in line.labels for line in lines))
    done = Reproduction(
        recipe, axes, unit_of(recipe.measure), tuple(lines), tuple(notes), result.failures, result.refused, folder, ()
    )
    return replace(done, files=(*_write(done, sweep.command), *draw(recipe, runs, folder)))


def _label_notes(runs: Sequence[tuple[RecipeRow, Sequence[SeedRun]]]) -> list[str]:
    """Return what the labels of these runs said, each sentence once, with the rows and seeds that it is about."""
    about: dict[str, dict[str, list[int]]] = {}
    for row, found in runs:
        for run in found:
            for note in run.notes:
                about.setdefault(note, {}).setdefault(row.name, []).append(run.seed)
    lines = []
    for note, rows in about.items():
        where = [f"{name} (seed{'s' * (len(seeds) > 1)} {_list(seeds)})" for name, seeds in rows.items()]
        lines.append(f"{'; '.join(where)}: {note}")
    return lines


def _labels(recipe: Recipe, row: RecipeRow) -> dict[str, str]:
    return {axis: row.labels.get(axis, "-") for axis in recipe.axes if axis not in recipe.readings}


def _planned(
    recipe: Recipe, rows: Sequence[RecipeRow], changes: Mapping[str, Any] | None, rounds: int | None
) -> tuple[list[tuple[RecipeRow, Config]], tuple[RefusedCell, ...]]:
    """Return the config of each row, and the rows whose components, as changed, don't go together."""
    planned, refused, errors = [], [], []
    for row in rows:
        try:
            planned += plan([row], changes, rounds)
        except CombinationError as error:
            errors.append(error)
            refused.append(RefusedCell(row.name, _labels(recipe, row), str(error).removeprefix(f"row {row.name!r}: ")))
    if errors and not planned:
        raise errors[0]
    return planned, tuple(refused)


def _run_of(config: Config) -> str:
    """Return the part of a config by which the runs of two rows differ."""
    return f"{config.hash} {config.training.smallest_batch}"


def _check_data(recipe: Recipe, planned: Sequence[tuple[RecipeRow, Config]]) -> None:
    """Raise DataError where files of a data set are missing; the message names the rows that could be run."""
    missing: dict[str, str] = {}
    others: dict[str, None] = {}
    for row, config in planned:
        if place := absent(row.tree["data"], config.data.root):
            missing.setdefault(facts_of(row.tree["data"]).title, place)
        elif label := row.labels.get("dataset"):
            others[label] = None
    if not missing:
        return
    title, place = next(iter(missing.items()))
    rest = f"; rows that can be run: --rows {','.join(others)!r}" if others else ""
    known = os.environ.get("FEDSKEW_DATA") or any(config.data.root for _, config in planned)
    root = "" if known else "; set the folder of the data sets by --data-root or FEDSKEW_DATA"
    raise DataError(f"{recipe.name}: {title} is missing: there is no {place}{root}{rest}")


def _finished(recipe: Recipe, cell: Cell, out: Path) -> list[SeedRun]:
    """Return the runs of a cell that finished."""
    found: list[SeedRun] = []
    for job in (Job(cell, seed) for seed in cell.config.seeds):
        if job.is_finished(out):
            found += read_runs(job.folder(out), cell.label)
            if "domain" in recipe.readings:
                found[-1].summary["final"]["domains"] = domain_accuracies(job.config, job.seed, job.folder(out))
    return found


def compare(recipe: Recipe, runs: Sequence[tuple[RecipeRow, Sequence[SeedRun]]]) -> list[Comparison]:
    """Compare the values of a recipe's runs with what the paper prints.

    Args:
        recipe: The recipe.
        runs: The finished runs of each row.

    Returns:
        A comparison for each printed value that has a run.
    """
    table = None if recipe.published is None else published(recipe.published)
    readings: list[Labels] = [{}]
    for axis, of_axis in recipe.readings.items():
        readings = [{**reading, axis: label} for reading in readings for label in of_axis]
    values: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    ceilings: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for row, seeds in runs:
        most = {run.seed: value for run in seeds if (value := ceiling(run, recipe.measure)) is not None}
        for reading in readings:
            found = {run.seed: value_of(run, recipe.measure, reading) for run in seeds}
            values[_key({**row.labels, **reading})] = {seed: x for seed, x in found.items() if x is not None}
            ceilings[_key({**row.labels, **reading})] = most
    lines = []
    for key, ours in values.items():
        labels, most = dict(key), ceilings[key]
        if recipe.relative:
            most = {}
            basis = recipe.relative.get(labels["method"])
            if basis is None:
                continue
            other = values.get(_key({**labels, "method": basis}), {})
            ours = {seed: value - other[seed] for seed, value in ours.items() if seed in other}
        lines.append(Comparison(labels, ours, None if table is None else table.find(labels), most))
    return lines


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _reading(recipe: Recipe, lines: Sequence[Comparison]) -> list[str]:
    """Return how to read the columns."""
    what = describe_measure(recipe.measure)
    if recipe.relative:
        what = f"change of {what}, in points, against the same method with uniform selection"
    several = any(len(line.ours) > 1 for line in lines)
    spread = "mean ± standard deviation over seeds (ddof = 1)" if several else "one seed, so no spread is known"
    notes = [f"Ours: {what}; {spread}."]
    if any(line.theirs is not None for line in lines):
        theirs = published(str(recipe.published))
        notes.append(f"Theirs, {theirs.source}: {theirs.metric}.")
    else:
        notes.append("The paper prints no numbers for these rows.")
    if any(not line.ours for line in lines):
        notes.append("-: no value, because the run failed or ended before that round.")
    return notes


def _changes(recipe: Recipe, rows: Sequence[RecipeRow], planned: Sequence[tuple[RecipeRow, Config]]) -> list[str]:
    """Return a note on what was changed from the recipe; empty where nothing was."""
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
            if before.get(key) != after.get(key) and not key.startswith((*_UNREPORTED, "name")):
                text = f"{key} = {json.dumps(after.get(key))}"
                changes.setdefault(text, {})[json.dumps(before.get(key))] = None
    parts += [f"{text} instead of {' or '.join(old)}" if old else text for text, old in changes.items()]
    return [f"Changed from the recipe: {'; '.join(parts)}."] if parts else []


def _list(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _write(done: Reproduction, command: str) -> list[Path]:
    """Write `comparison.csv`, `by_seed.csv` and `comparison.md`."""
    lines: list[list[Any]] = [[*done.axes, "seeds", "ours_mean", "ours_std", "theirs_mean", "theirs_std", "difference"]]
    for line in done.lines:
        ours, theirs = line.spread, (None, None) if line.theirs is None else (line.theirs.mean, line.theirs.std)
        labels = [line.labels.get(axis, "") for axis in done.axes]
        lines.append([*labels, len(line.ours), ours.mean, ours.std, *theirs, line.difference])
    single: list[list[Any]] = [[*done.axes, "seed", "ours", "ceiling"]]
    for line in done.lines:
        labels = [line.labels.get(axis, "") for axis in done.axes]
        single += [[*labels, seed, value, line.ceilings.get(seed)] for seed, value in line.ours.items()]
    title = f"# {done.recipe.paper}: {done.recipe.title}"
    notes = [f"- {note}" for note in done.notes]
    page = "\n".join(
        [title, "", f"    {command}", "", markdown_table(*text_lines(done)), "", *_by_seed(done), *notes, ""]
    )
    files = {"comparison.csv": csv_text(lines), "by_seed.csv": csv_text(single), "comparison.md": page}
    try:
        done.folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (done.folder / name).write_text(content, encoding="utf-8", newline="\n")
    except OSError as error:
        raise RunError(f"{done.folder}: the comparison can't be written: {error.strerror}") from None
    return [done.folder / name for name in files]


def _by_seed(done: Reproduction) -> list[str]:
    """Return the sections of `comparison.md` on single seeds and federations; empty where there is one of each."""
    several = len({line.labels.get(DRAWN) for line in done.lines}) > 1
    sections = []
    if len(_seeds(done)) > 1:
        sections += ["## Seed by seed", "", markdown_table(*seed_lines(done)), ""]
    headings, body, labels = paired_lines(done)
    if body and (sections or several):
        by = f"{DRAWN} and seed, intervals over {DRAWN}s" if several else "seed"
        title = f"## Differences from {BASELINE}, paired by {by}"
        sections += [title, "", markdown_table(headings, body, labels), ""]
    return sections


def text_lines(done: Reproduction) -> tuple[list[str], list[list[str]], int]:
    """Return headings and cells as a person reads them, and how many columns are labels.

    Axes on which all lines agree are left out, and so are the paper's columns where it prints nothing.

    Args:
        done: The reproduction.
    """
    axes = _telling(done)
    unit = f", {done.unit}" if done.unit else ""
    printed = any(line.theirs is not None for line in done.lines)
    body = []
    for line in done.lines:
        cells = [*(line.labels.get(axis, "") for axis in axes), line.spread.text(2)]
        if printed:
            cells.append("" if line.theirs is None else Spread(line.theirs.mean, line.theirs.std).text(2))
            cells.append("" if line.difference is None else f"{line.difference:+.2f}")
        body.append(cells)
    values = [f"ours{unit}", *([f"theirs{unit}", "difference"] if printed else [])]
    return [*axes, *values], body, len(axes)


def seed_lines(done: Reproduction) -> tuple[list[str], list[list[str]], int]:
    """Return headings and cells of our values seed by seed, and how many columns are labels.

    Where a target's label mix does not allow 100 %, the lines of one task follow its ceiling (see
    `Comparison.ceilings`).

    Args:
        done: The reproduction.
    """
    axes, seeds = _telling(done), _seeds(done)
    body: list[list[str]] = []
    bounded = any(most < 100 for line in done.lines for most in line.ceilings.values())
    shown = set()
    for line in done.lines:
        task = _key({axis: label for axis, label in line.labels.items() if axis != "method"})
        if bounded and task not in shown and line.ceilings:
            alike = [other for other in done.lines if set(task) <= set(_key(other.labels))]
            known = [(seed, most) for other in alike for seed, most in other.ceilings.items()]
            lowest = {seed: min(most for of_seed, most in known if of_seed == seed) for seed, _ in known}
            labels = ["ceiling" if axis == "method" else line.labels.get(axis, "") for axis in axes]
            body.append([*labels, *(_one(lowest.get(seed)) for seed in seeds)])
            shown.add(task)
        body.append([*(line.labels.get(axis, "") for axis in axes), *(_one(line.ours.get(seed)) for seed in seeds)])
    return [*axes, *(f"seed {seed}" for seed in seeds)], body, len(axes)


def paired_lines(done: Reproduction) -> tuple[list[str], list[list[str]], int]:
    """Return headings and cells of every method's difference from FedAvg, and how many columns are labels.

    Differences are of the same task and seed (of the same federation, mean over its seeds, where a task has several);
    the interval is that of their mean, by Student's t.

    Args:
        done: The reproduction.
    """
    found = [] if done.recipe.relative else paired([(line.labels, line.ours) for line in done.lines])
    axes = [axis for axis in _telling(done) if axis != DRAWN]
    body = []
    for one in found:
        ends = "-" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}"
        labels = [one.labels.get(axis, "") for axis in axes]
        body.append([*labels, f"{one.mean:+.2f}", ends, f"{one.ahead} of {len(one.differences)}"])
    return [*axes, "difference", "95 % interval", "ahead"], body, len(axes)


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _seeds(done: Reproduction) -> list[int]:
    return sorted({seed for line in done.lines for seed in line.ours})


def _telling(done: Reproduction) -> list[str]:
    """Return the axes on which lines differ; where none do, one to name them by."""
    axes = [axis for axis in done.axes if len({line.labels.get(axis) for line in done.lines}) > 1]
    return axes or (["method"] if "method" in done.axes else list(done.axes[:1]))
