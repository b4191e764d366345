"""The tables of a sweep: a row for each cell, mean ± standard deviation over its seeds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedskew import models
from fedskew.errors import RunError
from fedskew.experiment._config import Config
from fedskew.experiment._folder import SeedRun
from fedskew.experiment._grid import Cell, Sweep
from fedskew.experiment._report import environment
from fedskew.experiment._simulate import run_folder
from fedskew.experiment._summary import spread
from fedskew.files import write_text

FIGURES = ("accuracy", "worst_class", "target_accuracy", "rounds_to_accuracy", "megabytes", "seconds")


@dataclass(frozen=True)
class Row:
    """A cell and the figures of its seeds, `{seed: {name of a figure: value or None}}`; a seed that failed is absent.

    `accuracy`, `worst_class` and `target_accuracy` are shares, means over the last 10 rounds; `rounds_to_accuracy` is
    the first evaluated round with the sweep's accuracy; `megabytes` (10**6 bytes) go up and down together.
    """

    cell: Cell
    seeds: dict[int, dict[str, float | None]]

    def values(self, figure: str) -> list[float]:
        """The known values of one figure, in order of the seeds."""
        return [value for figures in self.seeds.values() if (value := figures[figure]) is not None]

    def spread(self, figure: str) -> tuple[float, float | None] | None:
        """Mean and standard deviation (ddof 1; None for one seed); None where no seed has the figure."""
        values = self.values(figure)
        if not values:
            return None
        over = spread(values)
        assert over["mean"] is not None, "there is a value"
        return over["mean"], over["std"]


def row_of(cell: Cell, runs: Sequence[SeedRun], accuracy: float | None) -> Row:
    """The row of one cell from its runs."""
    return Row(cell, {run.seed: _figures(run, accuracy) for run in runs})


def columns(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """The figures that are asked for or that some row has, seconds last: they alone differ between two sweeps."""
    asked = set() if sweep.accuracy is None else {"rounds_to_accuracy"}
    return [figure for figure in FIGURES if figure in asked or any(row.values(figure) for row in rows)]


def text_table(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells as a person reads them: axes, number of seeds, figures (shares in percent)."""
    shown = columns(sweep, rows)
    headings = {
        "accuracy": "accuracy",
        "worst_class": "worst class",
        "target_accuracy": "target mix",
        "rounds_to_accuracy": f"rounds to {100 * (sweep.accuracy or 0):g} %",
        "megabytes": "MB",
        "seconds": "seconds",
    }
    body = [[*row.cell.values.values(), str(len(row.seeds)), *(_text(row, figure) for figure in shown)] for row in rows]
    return [*sweep.axes, "seeds", *(headings[figure] for figure in shown)], body


def notes(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """How to read the table, and which runs are missing from it."""
    most = max(len(row.seeds) for row in rows)
    lines = [
        "Accuracies in %, of the test set, means over the evaluations of the last 10 rounds; "
        + ("mean ± standard deviation over seeds (ddof = 1)." if most > 1 else "one seed, so no spread is known.")
    ]
    if any(row.values("target_accuracy") for row in rows):
        lines.append("Target mix: per-class accuracies averaged with the target's shares.")
    if sweep.accuracy is not None:
        lines.append(
            f"Rounds to {100 * sweep.accuracy:g} %: the first evaluated round with this test accuracy, over the seeds "
            "that reached it (how many, where not all did); - where none did."
        )
    lines.append(
        "MB: 10⁶ bytes, up and down, of all rounds. Seconds: all rounds without their evaluation; they depend on the "
        "machine and on how many runs share it."
    )
    lines += model_notes(row.cell.config for row in rows)
    lines += [
        f"Missing, as it failed: {row.cell.label}, seed {seed}."
        for row in rows
        for seed in row.cell.config.seeds
        if seed not in row.seeds
    ]
    return lines


def model_notes(configs: Iterable[Config]) -> list[str]:
    """What is to be known of the networks, each note once."""
    said = [models.note(config.model.name, config.model.parameters) for config in configs]
    return [f"Network: {note}." for note in dict.fromkeys(said) if note]


def write_tables(sweep: Sweep, rows: Sequence[Row], runs: Sequence[SeedRun], out: Path, folder: Path) -> None:
    """`table.csv`, `table.md`, `table.html`, and `runs.csv`, which has a line for each run and names its folder.

    Raises RunError where they can't be written.
    """
    headings, body = text_table(sweep, rows)
    remarks = [*notes(sweep, rows), *_origins(sweep, runs)]
    page = environment().get_template("sweep.html")
    files = {
        "table.csv": _csv(_cell_lines(sweep, rows)),
        "runs.csv": _csv(_run_lines(sweep, rows, out)),
        "table.md": _markdown(sweep, headings, body, remarks),
        "table.html": page.render(
            title=sweep.name, axes=len(sweep.axes), headings=headings, rows=body, remarks=remarks
        ),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    except OSError as error:
        raise RunError(f"{folder}: the tables can't be written: {error.strerror}") from None


def _figures(run: SeedRun, accuracy: float | None) -> dict[str, float | None]:
    last = run.summary["last10"]
    reached = [
        float(record["round"])
        for record in run.rounds
        if accuracy is not None and record["evaluation"] is not None and record["evaluation"]["accuracy"] >= accuracy
    ]
    return {
        "accuracy": last["accuracy"],
        "worst_class": last["worst_class"],
        "target_accuracy": last["target_accuracy"],
        "rounds_to_accuracy": reached[0] if reached else None,
        "megabytes": (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6,
        "seconds": run.summary["seconds"],
    }


def _text(row: Row, figure: str) -> str:
    over = row.spread(figure)
    if over is None:
        return "-"
    scale = 100 if figure in {"accuracy", "worst_class", "target_accuracy"} else 1
    mean, std = over
    text = f"{scale * mean:,.1f}" if std is None else f"{scale * mean:,.1f} ± {scale * std:,.1f}"
    known = len(row.values(figure))
    return text if known == len(row.seeds) else f"{text} ({known}/{len(row.seeds)})"


def _cell_lines(sweep: Sweep, rows: Sequence[Row]) -> Iterable[list[Any]]:
    shown = columns(sweep, rows)
    heading = [*sweep.axes, "seeds"]
    for figure in shown:
        heading += [f"{figure}_mean", f"{figure}_std", *(["reached"] if figure == "rounds_to_accuracy" else [])]
    yield heading
    for row in rows:
        line: list[Any] = [*row.cell.values.values(), len(row.seeds)]
        for figure in shown:
            line += row.spread(figure) or (None, None)
            line += [len(row.values(figure))] if figure == "rounds_to_accuracy" else []
        yield line


def _run_lines(sweep: Sweep, rows: Sequence[Row], out: Path) -> Iterable[list[Any]]:
    shown = columns(sweep, rows)
    yield [*sweep.axes, "seed", "folder", *shown]
    for row in rows:
        for seed, figures in row.seeds.items():
            folder = run_folder(row.cell.config.for_seed(seed), out).name
            yield [*row.cell.values.values(), seed, folder, *(figures[figure] for figure in shown)]


def _csv(lines: Iterable[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _markdown(sweep: Sweep, headings: list[str], body: list[list[str]], remarks: list[str]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---"] * len(sweep.axes) + ["---:"] * (len(headings) - len(sweep.axes))
    table = [line(headings), line(rule), *map(line, body)]
    return "\n".join([f"# {sweep.name}", "", *table, "", *(f"- {remark}" for remark in remarks)]) + "\n"


def _origins(sweep: Sweep, runs: Sequence[SeedRun]) -> list[str]:
    """The command, the seeds, and the machines and versions that the figures come from."""
    seeds = sorted({seed for cell in sweep.cells for seed in cell.config.seeds})
    lines = [f"Command: {sweep.command}. Seeds: {', '.join(map(str, seeds))}."]
    origins = {json.dumps([run.summary.get(key) for key in ("machine", "versions", "revision")]) for run in runs}
    for origin in sorted(origins):
        machine, versions, revision = json.loads(origin)
        packages = ", ".join(f"{name} {number}" for name, number in versions.items())
        where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
        threads = machine["threads"]
        at = "" if revision is None else f", revision {revision[:10]}"
        lines.append(f"{where}, {threads} thread{'s' if threads > 1 else ''} a run; {packages}{at}.")
    return lines
