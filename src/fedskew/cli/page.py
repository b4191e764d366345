"""A page of a command that looks at numbers: headings, sentences, tables, the options of all such commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.padding import Padding
from rich.table import Table

from fedskew.cli.console import Console
from fedskew.errors import ArgumentError
from fedskew.files import write_text, writing
from fedskew.tables import csv_text

CLASSES_SHOWN = 20
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")]
NoPicture = Annotated[bool, typer.Option("--no-picture", help="Draw nothing.")]


def picture_path(picture: Path | None, no_picture: bool, as_json: bool, default: Path) -> Path | None:
    """Return where to draw: as the options say, with JSON nowhere unless they say where."""
    if picture is not None and no_picture:
        raise ArgumentError("--no-picture: contradicts --picture; give only one of them")
    return None if no_picture else picture if picture is not None or as_json else default


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_heading(console: Console, text: str) -> None:
    """Print a heading."""
    console.print(f"\n[bold]{escaped(text)}[/bold]")


def print_sentences(console: Console, title: str, sentences: Iterable[str]) -> None:
    """Print a heading and a list of sentences."""
    print_heading(console, title)
    for sentence in sentences:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("•", escaped(sentence))
        console.print(Padding(grid, (0, 0, 0, 1)))


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of cells in rich's markup; headings with ">" are of numbers, and without any there is no line."""
    table = Table(box=None, show_header=any(headings), pad_edge=False, padding=(0, 2, 0, 1))
    for name in headings:
        justify: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table


def print_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    row: Callable[[int], list[str]],
    order: np.ndarray,
    most: int,
    note: str,
) -> None:
    """Print a row for each in the file's order; where they are more than `most`, the first of an order, with a note."""
    print_heading(console, title)
    shown = order[:most].tolist() if len(order) > most else range(len(order))
    console.print(table_of(headings, map(row, shown)))
    if len(shown) < len(order):
        console.print(f" [dim]the {len(shown)} {note}")


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table of cells."""
    with writing(path):
        write_text(path, csv_text(rows))


def escaped(text: str) -> str:
    """Return the text as it is, not as markup."""
    return text.replace("[", r"\[")
