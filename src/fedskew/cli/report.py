"""`fedskew report`: one page that compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "Comparison of runs",
) -> None:
    """Write one self-contained page that compares runs: pictures first, then the table.

    Example:

        fedskew report runs/digits-fedavg-* runs/digits-fedvls-* --out comparison.html
    """
    from fedskew.experiment import read_runs
    from fedskew.report import write_report

    runs = [run for folder in folders for run in read_runs(folder)]
    Console().print(f"report: {write_report(runs, out, title)}", soft_wrap=True)
