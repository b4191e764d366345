"""Tables of results."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from fedskew.experiment import Result, SweepResult, over_seeds, text_table

COLUMNS = (
    ("accuracy", "accuracy"),
    ("worst class", "worst_class"),
    ("target mix", "target_accuracy"),
)


def results_table(results: Sequence[Result], title: str = "Test set, mean of the last 10 rounds, %") -> Table:
    """Figures of each result over its last 10 rounds, mean ± standard deviation over its seeds, in percent."""
    seeds = {len(result.runs) for result in results}
    caption = f"mean ± standard deviation over {min(seeds)} seeds" if min(seeds) > 1 else "one seed: no spread is known"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("run", overflow="fold")
    rows = [over_seeds([run.summary for run in result.runs])["last10"] for result in results]
    columns = [entry for entry in COLUMNS if any(row[entry[1]]["mean"] is not None for row in rows)]
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for result, row in zip(results, rows, strict=True):
        seconds = sum(run.summary["seconds"] for run in result.runs)
        table.add_row(result.config.name, *(percent(row[name]) for _, name in columns), f"{seconds:.1f}")
    return table


def percent(figure: dict[str, float | None]) -> str:
    """`mean ± std` in percent."""
    mean, std = figure["mean"], figure["std"]
    if mean is None:
        return "-"
    return f"{100 * mean:.1f}" if std is None else f"{100 * mean:.1f} ± {100 * std:.1f}"


def sweep_table(result: SweepResult, width: int) -> Table:
    """A row for each cell of a sweep, as in its `table.md`; figures over two lines where `width` is too small."""
    headings, rows = text_table(result.sweep, result.rows)
    axes = len(result.sweep.axes)
    if sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True)) > width:
        headings = [*headings[:axes], *(heading.replace(" ", "\n", 1) for heading in headings[axes:])]
        rows = [[*row[:axes], *(re.sub(r" (?=[±(])", "\n", cell) for cell in row[axes:])] for row in rows]
    table = Table(title=Text(result.sweep.name), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if at < axes else "right", no_wrap=at >= axes, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
