"""The result of a sweep, a row for each cell: mean ± standard deviation over its seeds; its tables and its report."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedskew import models
from fedskew.experiment._config import Config
from fedskew.experiment._grid import Cell, Sweep
from fedskew.files import write_text
from fedskew.report import SeedRun, write_report
from fedskew.tables import Spread, csv_text, filled, markdown_table

HEADINGS = {
    **SeedRun.FIGURES,
    "last_tenth": "last tenth",
    "rounds_to_accuracy": "rounds to {:g} %",
    "megabytes": "MB",
    "seconds": "seconds",
}
_SHARES = {*SeedRun.FIGURES, "last_tenth"}

Reasons = Mapping[tuple[str, int], str]
"""Why runs failed, or were not begun, by label of the cell and seed."""


@dataclass(frozen=True)
class CellResult:
    """A row of a sweep's table: its label on each axis, the seeds asked for, and each finished seed's numbers by name.
    `failed` and `refused` say why others failed, or were not begun. `report.FIGURES` are shares, of what the cell's
    `evaluation.summary` names, in words `shown`; `last_tenth` is the run's measure over the last tenth of the rounds,
    `rounds_to_accuracy` the first evaluated one with the sweep's, `megabytes` (10**6) are up and down. `again`: the
    same runs have an earlier row. `config`: None where the combination makes no sense."""

    label: str
    labels: tuple[str, ...]
    asked: tuple[int, ...]
    config: Config | None = None
    seeds: Mapping[int, dict[str, float | None]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    shown: str = ""
    again: bool = False

    def values(self, figure: str) -> list[float]:
        """Return the known values of one number, in order of the seeds."""
        return [value for figures in self.seeds.values() if (value := figures[figure]) is not None]

    def spread(self, figure: str) -> Spread:
        """Return mean and standard deviation of one number."""
        return Spread.of(self.values(figure))

    def cells(self, figures: Sequence[str]) -> list[str]:
        """Return the row as a person reads it: labels, how many seeds, numbers."""
        finished = "refused" if len(self.refused) == len(self.asked) else str(len(self.seeds))
        if finished != "refused" and len(self.seeds) < len(self.asked):
            finished += f" of {len(self.asked)}"
        cells = [*self.labels, finished]
        for figure in figures:
            text, known = self.spread(figure).text(scale=100 if figure in _SHARES else 1), len(self.values(figure))
            cells.append(text if known in (0, len(self.seeds)) else f"{text} ({known}/{len(self.seeds)})")
        return cells

    def reasons(self) -> Iterator[str]:
        """Yield which seeds are missing, and why."""
        name = self.label.removesuffix(SeedRun.as_trained(""))
        for seed in self.asked:
            if seed not in self.seeds and seed not in self.refused:
                because = f": {self.failed[seed]}" if seed in self.failed else "."
                yield f"Missing, as it failed: {name}, seed {seed}{because}"
        for reason in dict.fromkeys(self.refused.values()):
            seeds = [str(seed) for seed, own in self.refused.items() if own == reason]
            of = "" if len(seeds) == len(self.asked) else f", seed {', '.join(seeds)}"
            yield f"Refused: {name}{of}: {reason}"


@dataclass(frozen=True)
class SweepResult:
    """The result of `run_sweep`: finished runs, failures, and a row for each cell (two if its method has a finish)."""

    sweep: Sweep
    rows: tuple[CellResult, ...]
    runs: tuple[SeedRun, ...]
    folder: Path
    failures: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        sweep: Sweep,
        runs: Sequence[SeedRun],
        out: Path,
        failed: Reasons | None = None,
        refused: Reasons | None = None,
    ) -> "SweepResult":
        """Read the result of a sweep from its finished runs, whose labels are those of the cells."""
        failed, refused = failed or {}, refused or {}
        rows = [row for cell in sweep.cells for row in _rows(cell, runs, sweep.accuracy, failed, refused)]
        seeds = rows[0].asked  # the same for all cells
        rows += [
            CellResult(cell.label, (*cell.values.values(),), seeds, refused=dict.fromkeys(seeds, cell.reason))
            for cell in sweep.refused
        ]
        failures = (f"{label}, seed {seed}: {reason}" for (label, seed), reason in failed.items())
        left_out = (f"{label}: {reason}" for label, reason in refused_cells(sweep, refused).items())
        return cls(sweep, tuple(rows), tuple(runs), sweep.folder(out), tuple(failures), tuple(left_out))

    @property
    def report(self) -> Path:
        """The page that compares all runs; it is missing where no run finished."""
        return self.folder / "report.html"

    @property
    def columns(self) -> list[str]:
        """The numbers that the sweep names or that some row has, seconds last: they alone differ between sweeps."""
        wanted = set() if self.sweep.accuracy is None else {"rounds_to_accuracy"}
        shown = SeedRun.shown_figures(self.runs)
        names = [*shown, *(name for name in HEADINGS if name not in SeedRun.FIGURES)]
        return [figure for figure in names if figure in wanted or any(row.values(figure) for row in self.rows)]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and cells as a person reads them: axes, number of seeds, numbers (shares in percent)."""
        shown, accuracy = self.columns, 100 * (self.sweep.accuracy or 0)
        headings = [*self.sweep.axes, "seeds", *(HEADINGS[figure].format(accuracy) for figure in shown)]
        return headings, [row.cells(shown) for row in self.rows]

    def notes(self) -> list[str]:
        """Return how to read the table, and which runs are missing from it."""
        configs = [row.config for row in self.rows if row.config is not None]
        lines = filled(
            "fedskew.experiment",
            "notes.txt",
            {},
            shown=" or ".join(dict.fromkeys(row.shown for row in self.rows if row.seeds)),
            most=max(len(row.seeds) for row in self.rows),
            columns=self.columns,
            accuracy=self.sweep.accuracy,
            finish=any("finish" in config.method for config in configs),
        ).splitlines()
        reasons = (reason for row in self.rows if not row.again for reason in row.reasons())
        return [*lines, *SweepResult.model_notes(configs), *reasons]

    def write_tables(self) -> None:
        """Write `table.csv` and `table.md`, and `runs.csv`, a line for each run with the name of its folder."""
        headings, body = self.table()
        table = markdown_table(headings, body, len(self.sweep.axes))
        notes = [f"- {note}" for note in self._file_notes()]
        files = {
            "table.csv": csv_text(self._cell_lines()),
            "runs.csv": csv_text(self._run_lines()),
            "table.md": "\n".join([f"# {self.sweep.name}", "", table, "", *notes, ""]),
        }
        for name, text in files.items():
            write_text(self.folder / name, text)

    def write_report(self) -> None:
        """Write the page that compares all runs, if there are any."""
        if self.runs:
            axes = {row.label: dict(zip(self.sweep.axes, row.labels, strict=True)) for row in self.rows if row.config}
            accuracy = self.sweep.accuracy
            name, notes = self.sweep.name, self._file_notes()
            write_report(self.runs, self.report, name, axes=axes, accuracy=accuracy, notes=notes)

    def _file_notes(self) -> list[str]:
        seeds = sorted({seed for cell in self.sweep.cells for seed in cell.config.seeds})
        ends = [(run, run.finish_note) for run in self.runs]
        return [
            *self.notes(),
            *(f"{run.label}, seed {run.seed}: {said}" for run, said in ends if said is not None),
            f"Command: {self.sweep.command}. Seeds: {', '.join(map(str, seeds))}.",
            *SeedRun.machine_notes(self.runs),
        ]

    def _cell_lines(self) -> Iterator[list[Any]]:
        heading = [*self.sweep.axes, "seeds", "failed"]
        for figure in self.columns:
            heading += [f"{figure}_mean", f"{figure}_std", *(["reached"] if figure == "rounds_to_accuracy" else [])]
        yield heading
        for row in self.rows:
            line: list[Any] = [*row.labels, len(row.seeds), len(row.asked) - len(row.seeds)]
            for figure in self.columns:
                spread = row.spread(figure)
                line += [spread.mean, spread.std]
                line += [len(row.values(figure))] if figure == "rounds_to_accuracy" else []
            yield line

    def _run_lines(self) -> Iterator[list[Any]]:
        shown = self.columns
        yield [*self.sweep.axes, "seed", "folder", *shown, "failure"]
        for row in self.rows:
            reasons = {**row.failed, **{seed: f"refused: {why}" for seed, why in row.refused.items()}}
            for seed in (*row.seeds, *reasons):
                folder = "" if row.config is None else row.config.for_seed(seed).folder(self.folder).name
                figures = [row.seeds[seed][figure] if seed in row.seeds else None for figure in shown]
                yield [*row.labels, seed, folder, *figures, reasons.get(seed, "")]

    @staticmethod
    def model_notes(configs: Iterable[Config]) -> list[str]:
        """Return the notes on the networks of some configs, each once."""
        found = [models.note(config.model.name, {"weights": config.model.weights}) for config in configs]
        return [f"Network: {note}." for note in dict.fromkeys(found) if note]


def _rows(
    cell: Cell, runs: Sequence[SeedRun], accuracy: float | None, failed: Reasons, refused: Reasons
) -> list[CellResult]:
    """Read the results of a cell from its runs: one, or two where its method has a finish."""
    why, why_not = (
        {seed: reason for (label, seed), reason in reasons.items() if label == cell.label}
        for reasons in (failed, refused)
    )
    own = [run for run in runs if run.label == cell.label]
    by_label = SeedRun.by_label(SeedRun.with_finished(own))
    if len(by_label) < 2:
        by_label = {cell.label: own}
    found: list[CellResult] = []
    for label, seeds in by_label.items():
        first, *others = cell.values.values()
        labels = (f"{first}{label.removeprefix(cell.label)}", *others)
        figures = {run.seed: _figures(run, accuracy) for run in seeds}
        shown = SeedRun.headline_in_words(seeds)
        asked = tuple(cell.config.seeds)
        found.append(CellResult(label, labels, asked, cell.config, figures, why, why_not, shown, again=bool(found)))
    return found


def _figures(run: SeedRun, accuracy: float | None) -> dict[str, float | None]:
    return {
        **{name: run.headline.get(name) for name in SeedRun.FIGURES},
        "last_tenth": run.last_tenth.get(run.measure),
        "rounds_to_accuracy": None if accuracy is None else run.rounds_to(accuracy),
        "megabytes": (run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6,
        "seconds": run.summary["seconds"],
    }


def refused_cells(sweep: Sweep, refused: Reasons) -> dict[str, str]:
    """Return why cells are refused, by label: they make no sense, or can't be set up for some seed."""
    found = {cell.label: cell.reason for cell in sweep.refused}
    for (label, _), reason in refused.items():
        found.setdefault(label, reason)
    return found
