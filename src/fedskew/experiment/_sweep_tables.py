"""The tables of a sweep: a row for each cell, mean ± standard deviation over its seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedskew import models
from fedskew.errors import RunError
from fedskew.experiment._config import Config
from fedskew.experiment._grid import Cell, Sweep
from fedskew.experiment._simulate import run_folder
from fedskew.files import write_text
from fedskew.report import (
    SeedRun,
    as_trained,
    finish_in_words,
    headline,
    headline_in_words,
    last_tenth,
    machine_notes,
    rounds_to,
    with_finished,
)
from fedskew.tables import Spread, csv_text, markdown_table

FIGURES = (
    "accuracy", "worst_class", "target_accuracy", "last_tenth", "rounds_to_accuracy", "megabytes", "seconds",
)  # fmt: skip
_SHARES = {"accuracy", "worst_class", "target_accuracy", "last_tenth"}


@dataclass(frozen=True)
class CellResult:
    """The numbers of one cell of a sweep.

    `accuracy`, `worst_class` and `target_accuracy` are shares, of what the cell's `evaluation.summary` names.
    `last_tenth` is the mean over the last tenth of the rounds, of `target_accuracy` where that is known, else of
    `accuracy`. `rounds_to_accuracy` is the first evaluated round with the sweep's accuracy; `megabytes` (10**6 bytes)
    are up and down together; `seconds`.

    Attributes:
        cell: The cell.
        seeds: The numbers by name, for each seed; a seed whose run failed is absent.
        failures: Why runs failed, by seed.
        refused: Why runs were not begun, by seed.
        shown: What the accuracies are of, in words.
        again: Whether the same runs have an earlier row, so that what failed has been said.
    """

    cell: Cell
    seeds: dict[int, dict[str, float | None]]
    failures: Mapping[int, str] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    shown: str = ""
    again: bool = False

    @classmethod
    def of(
        cls,
        cell: Cell,
        runs: Sequence[SeedRun],
        accuracy: float | None,
        failures: Mapping[int, str] | None = None,
        refused: Mapping[int, str] | None = None,
    ) -> CellResult:
        """Read the result of a cell from its runs.

        Args:
            cell: The cell.
            runs: Its finished runs.
            accuracy: The test accuracy whose first round is looked for.
            failures: Why other runs of it failed, by seed.
            refused: Why others were not begun, by seed.
        """
        figures = {run.seed: _figures(run, accuracy) for run in runs}
        return cls(cell, figures, failures or {}, refused or {}, headline_in_words(runs))

    def values(self, figure: str) -> list[float]:
        """Return the known values of one number, in order of the seeds.

        Args:
            figure: The number's name.
        """
        return [value for figures in self.seeds.values() if (value := figures[figure]) is not None]

    def spread(self, figure: str) -> Spread:
        """Return mean and standard deviation of one number.

        Args:
            figure: The number's name.
        """
        return Spread.of(self.values(figure))


def rows_of(
    cell: Cell,
    runs: Sequence[SeedRun],
    accuracy: float | None,
    failures: Mapping[int, str],
    refused: Mapping[int, str],
) -> list[CellResult]:
    """Read the results of a cell from its runs: one, or two where its method has a finish.

    Args:
        cell: The cell.
        runs: Its finished runs.
        accuracy: See `CellResult.of`.
        failures: See `CellResult.of`.
        refused: See `CellResult.of`.
    """
    by_label: dict[str, list[SeedRun]] = {}
    for run in with_finished(runs):
        by_label.setdefault(run.label, []).append(run)
    if len(by_label) < 2:
        return [CellResult.of(cell, runs, accuracy, failures, refused)]
    axis = next(iter(cell.values), None)
    found: list[CellResult] = []
    for label, own in by_label.items():
        said = label.removeprefix(cell.label)
        values = {name: f"{value}{said}" if name == axis else value for name, value in cell.values.items()}
        row = CellResult.of(replace(cell, label=label, values=values), own, accuracy, failures, refused)
        found.append(replace(row, again=bool(found)))
    return found


def columns(sweep: Sweep, rows: Sequence[CellResult]) -> list[str]:
    """Return the numbers that the sweep names or that some row has, seconds last: they alone differ between sweeps."""
    wanted = set() if sweep.accuracy is None else {"rounds_to_accuracy"}
    return [figure for figure in FIGURES if figure in wanted or any(row.values(figure) for row in rows)]


def text_table(sweep: Sweep, rows: Sequence[CellResult]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells as a person reads them: axes, number of seeds, numbers (shares in percent).

    Args:
        sweep: The sweep.
        rows: The results of its cells.
    """
    shown = columns(sweep, rows)
    headings = {
        "accuracy": "accuracy",
        "worst_class": "worst class",
        "target_accuracy": "target mix",
        "last_tenth": "last tenth",
        "rounds_to_accuracy": f"rounds to {100 * (sweep.accuracy or 0):g} %",
        "megabytes": "MB",
        "seconds": "seconds",
    }
    body = [[*row.cell.values.values(), _seeds(row), *(_text(row, figure) for figure in shown)] for row in rows]
    body += [[*cell.values.values(), "refused", *("-" for _ in shown)] for cell in sweep.refused]
    return [*sweep.axes, "seeds", *(headings[figure] for figure in shown)], body


def sweep_notes(sweep: Sweep, rows: Sequence[CellResult]) -> list[str]:
    """Return how to read the table, and which runs are missing from it.

    Args:
        sweep: The sweep.
        rows: The results of its cells.
    """
    most = max(len(row.seeds) for row in rows)
    shown = " or ".join(dict.fromkeys(row.shown for row in rows if row.seeds))
    lines = [
        f"Accuracies in %, of the test set, {shown or 'no run is finished'}; "
        + ("mean ± standard deviation over seeds (ddof = 1)." if most > 1 else "one seed, so no spread is known.")
    ]
    if any(row.values("target_accuracy") for row in rows):
        lines.append("Target mix: per-class accuracies averaged with the target's shares.")
    if any(row.values("last_tenth") for row in rows):
        lines.append(
            "Last tenth: mean of the evaluations in the last tenth of the rounds, on the target mix where there is one."
        )
    if sweep.accuracy is not None:
        lines.append(
            f"Rounds to {100 * sweep.accuracy:g} %: the first evaluated round with this test accuracy, over the seeds "
            "that reached it (how many, where not all did); - where none did."
        )
    lines.append(
        "MB: 10⁶ bytes, up and down, of all rounds. Seconds: all rounds without their evaluation; they depend on the "
        "machine and on how many runs share it."
    )
    if any("finish" in row.cell.config.method for row in rows):
        lines.append(
            "As trained, after a finish: the last round's model alone, on one evaluation, not a mean over rounds."
        )
    lines += model_notes(row.cell.config for row in rows)
    lines += [
        f"Missing, as it failed: {_run_name(row)}, seed {seed}{_because(row.failures.get(seed))}"
        for row in rows
        if not row.again
        for seed in row.cell.config.seeds
        if seed not in row.seeds and seed not in row.refused
    ]
    for row in (row for row in rows if not row.again):
        for reason in dict.fromkeys(row.refused.values()):
            seeds = [seed for seed, own in row.refused.items() if own == reason]
            of = "" if len(seeds) == len(row.cell.config.seeds) else f", seed {', '.join(map(str, seeds))}"
            lines.append(f"Refused: {_run_name(row)}{of}: {reason}")
    lines += [f"Refused: {cell.label}: {cell.reason}" for cell in sweep.refused]
    return lines


def table_notes(sweep: Sweep, rows: Sequence[CellResult], runs: Sequence[SeedRun]) -> list[str]:
    """Return what stands below the table in files: `sweep_notes`, the command, and the machines.

    Args:
        sweep: The sweep.
        rows: The results of its cells.
        runs: All finished runs.
    """
    seeds = sorted({seed for cell in sweep.cells for seed in cell.config.seeds})
    command = f"Command: {sweep.command}. Seeds: {', '.join(map(str, seeds))}."
    ends = [f"{run.label}, seed {run.seed}: {said}" for run in runs if (said := finish_in_words(run)) is not None]
    return [*sweep_notes(sweep, rows), *ends, command, *machine_notes(runs)]


def model_notes(configs: Iterable[Config]) -> list[str]:
    """Return the notes on the networks of some configs, each once.

    Args:
        configs: The configs.
    """
    found = [models.note(config.model.name, config.model.parameters) for config in configs]
    return [f"Network: {note}." for note in dict.fromkeys(found) if note]


def write_tables(sweep: Sweep, rows: Sequence[CellResult], runs: Sequence[SeedRun], out: Path, folder: Path) -> None:
    """Write `table.csv` and `table.md`, and `runs.csv`, a line for each run with the name of its folder.

    Args:
        sweep: The sweep.
        rows: The results of its cells.
        runs: All finished runs.
        out: Where the run folders are.
        folder: Where the tables go; it is made.

    Raises:
        RunError: They can't be written.
    """
    headings, body = text_table(sweep, rows)
    table = markdown_table(headings, body, len(sweep.axes))
    markdown = [f"# {sweep.name}", "", table, "", *(f"- {note}" for note in table_notes(sweep, rows, runs)), ""]
    files = {
        "table.csv": csv_text(_cell_lines(sweep, rows)),
        "runs.csv": csv_text(_run_lines(sweep, rows, out)),
        "table.md": "\n".join(markdown),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
    except OSError as error:
        raise RunError(f"{folder}: the tables can't be written: {error.strerror}") from None


def _figures(run: SeedRun, accuracy: float | None) -> dict[str, float | None]:
    figures, tenth = headline(run), last_tenth(run)
    over = tenth.get("target_accuracy")
    return {
        **{name: figures.get(name) for name in ("accuracy", "worst_class", "target_accuracy")},
        "last_tenth": tenth.get("accuracy") if over is None else over,
        "rounds_to_accuracy": None if accuracy is None else rounds_to(run, accuracy),
        "megabytes": (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6,
        "seconds": run.summary["seconds"],
    }


def _seeds(row: CellResult) -> str:
    finished, asked = len(row.seeds), len(row.cell.config.seeds)
    if len(row.refused) == asked:
        return "refused"
    return str(finished) if finished == asked else f"{finished} of {asked}"


def _run_name(row: CellResult) -> str:
    return row.cell.label.removesuffix(as_trained(""))


def _because(reason: str | None) -> str:
    return "." if reason is None else f": {reason}"


def _text(row: CellResult, figure: str) -> str:
    text = row.spread(figure).text(scale=100 if figure in _SHARES else 1)
    known = len(row.values(figure))
    return text if known in (0, len(row.seeds)) else f"{text} ({known}/{len(row.seeds)})"


def _cell_lines(sweep: Sweep, rows: Sequence[CellResult]) -> Iterable[list[Any]]:
    shown = columns(sweep, rows)
    heading = [*sweep.axes, "seeds", "failed"]
    for figure in shown:
        heading += [f"{figure}_mean", f"{figure}_std", *(["reached"] if figure == "rounds_to_accuracy" else [])]
    yield heading
    for row in rows:
        line: list[Any] = [*row.cell.values.values(), len(row.seeds), len(row.cell.config.seeds) - len(row.seeds)]
        for figure in shown:
            spread = row.spread(figure)
            line += [spread.mean, spread.std]
            line += [len(row.values(figure))] if figure == "rounds_to_accuracy" else []
        yield line
    seeds = len(sweep.cells[0].config.seeds)  # the same for all cells
    for cell in sweep.refused:
        values = len(heading) - len(cell.values) - 2
        yield [*cell.values.values(), 0, seeds, *(None for _ in range(values))]


def _run_lines(sweep: Sweep, rows: Sequence[CellResult], out: Path) -> Iterable[list[Any]]:
    shown = columns(sweep, rows)
    yield [*sweep.axes, "seed", "folder", *shown, "failure"]
    for row in rows:
        for seed, figures in row.seeds.items():
            folder = run_folder(row.cell.config.for_seed(seed), out).name
            yield [*row.cell.values.values(), seed, folder, *(figures[figure] for figure in shown), ""]
        for seed, reason in {**row.failures, **{seed: f"refused: {why}" for seed, why in row.refused.items()}}.items():
            folder = run_folder(row.cell.config.for_seed(seed), out).name
            yield [*row.cell.values.values(), seed, folder, *(None for _ in shown), reason]
    for cell in sweep.refused:
        yield [*cell.values.values(), "", "", *(None for _ in shown), f"refused: {cell.reason}"]
