"""What commands print: text of files and sites that can't move the cursor, headings, sentences, tables, JSON."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import click
import numpy as np
import rich.console
import typer
from rich import box
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text
from typer import Option

from fedskew.errors import ArgumentError
from fedskew.files import replacing, writing
from fedskew.names import visible
from fedskew.tables import csv_text, latex_table

CLASSES_SHOWN, FOLDED = 20, 24
KEEP = "\n\t"
BOXED: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
RULED: dict[str, Any] = BOXED | {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
BARE: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 1), "header_style": "dim"}

Cell: TypeAlias = str | Text
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a page.")]
NoPicture = Annotated[bool, Option("--no-picture", help="Draw nothing.")]


class Console(rich.console.Console):
    """rich's console, which writes characters that can't be seen as escapes (see `names.visible`).

    With `fedskew --csv` or `--latex` tables go to the standard output in that form, and all else beside it.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | ({} if _form() is None else {"stderr": True}))

    def print(self, *objects: Any, **settings: Any) -> None:
        """See rich."""
        shown, form = list[Any](), _form()
        for one in objects:
            if form is not None and isinstance(one, Table) and one.show_header:
                typer.echo(form(*_cells(one)))
            else:
                shown.append(one)
        if shown or not objects:
            super().print(*shown, **settings)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a text as it is, whatever its width."""
        self.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    def note(self, text: str, style: str | None = None) -> None:
        """Print a text as it is, wrapped."""
        self.print(text, style=style, markup=False, highlight=False)

    def warn(self, notes: Iterable[str]) -> None:
        """Print notes, a line each."""
        for text in notes:
            self.say(f"note: {text}", style="yellow")

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.print(Text(f"\n{text}", style="bold"))

    def sentences(self, title: str, sentences: Iterable[str]) -> None:
        """Print a heading and a list of sentences."""
        self.heading(title)
        for sentence in sentences:
            grid = Table.grid("", Column(overflow="fold"), padding=(0, 1))
            grid.add_row("•", Text(visible(sentence, KEEP)))
            self.print(Padding(grid, (0, 0, 0, 1)))

    def wide_table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], title: str, caption: str) -> None:
        """Print a table as some below each other, each with the first column, where it is wider than the console.

        Of the first column's texts, which are folded then, only so much counts as `FOLDED` has.
        """
        room, done = self.width + max(0, *(len(row[0]) - FOLDED for row in rows)), 1
        as_wide = self.options.update(max_width=sys.maxsize)
        while done < len(headings):
            for end in range(len(headings), done, -1):
                own = [0, *range(done, end)]
                cells = ([row[at] for at in own] for row in rows)
                made = table_of([headings[at] for at in own], cells, title if done == 1 else "", **BOXED)
                if _form() is not None or self.measure(made, options=as_wide).maximum <= room:
                    break
            self.print(made)
            done = end
        self.note(caption, style="italic dim")

    def columns(
        self, title: str, columns: Mapping[str, Sequence[Cell]], order: np.ndarray, note: str, most: int = CLASSES_SHOWN
    ) -> None:
        """Print a table by its columns, in the file's order; of more than `most` rows the first of an order."""
        self.heading(title)
        shown = order[:most].tolist() if len(order) > most else range(len(order))
        self.print(table_of(list(columns), ([cells[at] for cells in columns.values()] for at in shown), **BARE))
        if len(shown) < len(order):
            self.print(f" [dim]the {len(shown)} {note}")

    @property
    def wide(self) -> "Console":
        """The console itself; in a log, one where lines may be long."""
        return self if self.is_terminal else Console(width=160)

    def render_str(self, text: str, **more: Any) -> Text:
        """See rich; here, so that the width of what is shown is known."""
        return super().render_str(visible(text, KEEP), **more)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See rich."""
        for one in super().render(renderable, options):
            yield one if one.control or one.text.isprintable() else one._replace(text=visible(one.text, KEEP))


def _form() -> Callable[[Sequence[str], Sequence[Sequence[str]]], str] | None:
    """Return what writes tables in the form that the command line wants; None: they are drawn."""
    context = click.get_current_context(silent=True)
    wanted = {} if context is None else context.find_root().params
    if wanted.get("csv"):
        return lambda headings, rows: csv_text([headings, *rows])
    return latex_table if wanted.get("latex") else None


def _cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table as texts on one line."""
    columns = [[" ".join(str(cell).split()) for cell in (column.header, *column.cells)] for column in table.columns]
    headings, *rows = (list(row) for row in zip(*columns, strict=True))
    return headings, rows


def table_of(headings: Sequence[str], rows: Iterable[Iterable[Cell]], title: str = "", **look: Any) -> Table:
    """Return a table; headings with ">" are of numbers, and without any there is no line. Texts are shown as is."""
    found = Table(title=Text(title) if title else None, show_header=any(headings), **look or RULED)
    for heading in headings:
        number = heading.startswith(">")
        justify: Any = "right" if number else "left"
        found.add_column(Text(heading.removeprefix(">")), justify=justify, no_wrap=number, overflow="fold")
    for row in rows:  # each cell as it is shown, so that its width is known
        found.add_row(*(cell if isinstance(cell, Text) else Text(visible(cell)) for cell in row))
    return found


def picture_path(picture: Path | None, no_picture: bool, as_json: bool, default: Path) -> Path | None:
    """Return where to draw: as the options say, with JSON nowhere unless they say where."""
    if picture is not None and no_picture:
        raise ArgumentError("--no-picture: contradicts --picture; give only one of them")
    return None if no_picture else picture if picture is not None or as_json else default


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_csv(path: Path, rows: Iterable[Sequence[Any]], *read: Path | None) -> None:
    """Write a table of cells, over nothing that the command read."""
    check_apart(path, *read)
    with writing(path), replacing(path) as part:
        part.write_text(csv_text(rows), encoding="utf-8")


def check_apart(path: Path | None, *read: Path | None) -> None:
    """Refuse to write over a file that the command is given, or that stands below a folder, or matches a pattern."""
    if path == Path("-"):
        raise ArgumentError("-: is no file's name here; give one")
    if path is None or not path.is_file():
        return
    given = [one for each in read if each is not None for one in (str(each), *glob(str(each)))]
    if any(path.resolve().is_relative_to(Path(one).resolve()) for one in given):
        raise ArgumentError(f"{path}: is there already, among what the command reads; write to another file")


def shares(values: Iterable[float], digits: int = 1) -> list[str]:
    """Return shares as percentages."""
    return [f"{value:.{digits}%}" for value in values]
