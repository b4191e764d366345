"""A page of a command that looks at numbers: headings, sentences, tables."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import typer
from rich.table import Table

from fedskew.cli.console import Console


def some_of(order: np.ndarray, most: int) -> list[int]:
    """Return the first of an order where there are more than `most`, else all in the order of the file."""
    return order[:most].tolist() if len(order) > most else list(range(len(order)))


def print_note(console: Console, shown: list[int], total: int, note: str) -> None:
    """Say below a table that it does not show all."""
    if len(shown) < total:
        console.print(f" [dim]{note}")


def print_json(value: dict[str, Any]) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def heading(console: Console, text: str) -> None:
    """Print a heading."""
    console.print(f"\n[bold]{escaped(text)}[/bold]")


def bullet(sentence: str) -> Table:
    """Return a sentence of a list."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row("•", escaped(sentence))
    return grid


def empty_table(*columns: tuple[str, Any], header: bool = True) -> Table:
    """Return an empty table of columns by name and justification."""
    table = Table(box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 1))
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold", header_style="dim")
    return table


def escaped(text: str) -> str:
    """Return the text as it is, not as markup."""
    return text.replace("[", r"\[")
