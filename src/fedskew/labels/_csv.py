"""Label counts and target mixes as comma-separated files; errors name file, line and column."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, nearest

FloatArray: TypeAlias = NDArray[np.float64]

LONG = ("client", "class", "count")
_EXAMPLES = "a wide header such as client,cat,dog, or client,class,count"

Row: TypeAlias = tuple[int, list[str]]
"""A row: its line number in the file, and its cells."""

Table: TypeAlias = tuple[FloatArray, list[str], list[str]]
"""Label counts, client names and class names."""


def read_counts(path: Path) -> Table:
    """Counts and names from a file in wide or long form; see `LabelCounts.read_csv`."""
    rows = _rows(path)
    first, header = _header(rows, path, _EXAMPLES)
    if sorted(header) == sorted(LONG):
        return _read_long(path, header, rows)
    if "client" not in header:
        hint = "; columns are separated by commas here" if any(";" in name for name in header) else ""
        _fail(path, first, f"no column 'client' in the header{hint} (expected {_EXAMPLES})")
    if len(header) == 1:
        _fail(path, first, "no column for any class beside 'client'")
    return _read_wide(path, header, rows)


def write_counts(
    path: Path, counts: FloatArray, clients: Sequence[str], classes: Sequence[str], form: Literal["wide", "long"]
) -> None:
    """Write counts and names in wide or long form; see `LabelCounts.to_csv`."""
    if form not in ("wide", "long"):
        raise ArgumentError(f"form: must be 'wide' or 'long', not {form!r}")
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("client", *classes) if form == "wide" else LONG)
            for client, row in zip(clients, counts, strict=True):
                cells = [_written(amount) for amount in row.tolist()]
                if form == "wide":
                    writer.writerow((client, *cells))
                else:
                    writer.writerows((client, *pair) for pair in zip(classes, cells, strict=True))
    except OSError as error:
        raise ArgumentError(f"{path}: can't be written: {error.strerror}") from None


def read_target(path: str | Path, classes: Sequence[str]) -> FloatArray:
    """Read a target label mix from a comma-separated file.

    The file has the columns `class` and `share`, one row per class, or one row of shares under a header of class names.
    Shares may be percentages or counts: they are divided by their sum.

    Args:
        path: The file.
        classes: Class names; the file's classes are matched to them by name.

    Returns:
        The mix in the order of `classes`, shape `(classes,)`, sum 1.

    Raises:
        ArgumentError: The file can't be read; the message names file, line and column.
    """
    path = Path(path)
    rows = _rows(path)
    expected = "class,share, or a header of class names over one row of shares"
    first, header = _header(rows, path, expected)
    found: dict[str, float] = {}
    if sorted(header) == ["class", "share"]:
        at = header.index("class")
        for line, cells in rows:
            _check_width(path, line, cells, header)
            if cells[at] in found:
                _fail(path, line, f"class {cells[at]!r} occurs twice")
            _check_known(path, line, cells[at], classes)
            found[cells[at]] = _amount(path, line, "share", cells[1 - at])
    else:
        row = next(rows, None)
        if row is None:
            _fail(path, first, f"nothing below the header (expected {expected})")
        _check_width(path, *row, header)
        for name, cell in zip(header, row[1], strict=True):
            _check_known(path, first, name, classes)
            found[name] = _amount(path, row[0], name, cell)
        more = next(rows, None)
        if more is not None:
            _fail(path, more[0], f"a second row of shares (expected {expected})")
    for name in classes:
        if name not in found:
            raise ArgumentError(f"{path}: no share for class {name!r}; write 0 where the target has none of it")
    shares = np.array([found[name] for name in classes])
    if not 0 < shares.sum() < np.inf:
        raise ArgumentError(f"{path}: the shares must have a positive sum, not {shares.sum()}")
    mix: FloatArray = shares / shares.sum()
    return mix


def _read_wide(path: Path, header: list[str], rows: Iterator[Row]) -> Table:
    at = header.index("client")
    classes = header[:at] + header[at + 1 :]
    lines: dict[str, int] = {}
    amounts = array("d")
    for line, cells in rows:
        _check_width(path, line, cells, header)
        client = cells.pop(at)
        _check_client(path, line, client)
        if client in lines:
            _fail(path, line, f"client {client!r} occurs twice; its first row is line {lines[client]}")
        lines[client] = line
        try:
            amounts.extend(map(float, cells))
        except ValueError:
            for name, cell in zip(classes, cells, strict=True):
                _amount(path, line, name, cell)
            raise
    if not amounts:
        raise ArgumentError(f"{path}: no client below the header (expected one row a client)")
    counts = np.frombuffer(amounts).reshape(len(lines), len(classes))
    illegal = ~((counts >= 0) & (counts < np.inf))
    if illegal.any():
        row, column = np.argwhere(illegal)[0]
        _amount(path, list(lines.values())[row], classes[column], str(counts[row, column]))
    return counts, list(lines), classes


def _read_long(path: Path, header: list[str], rows: Iterator[Row]) -> Table:
    places = [header.index(name) for name in LONG]
    clients: dict[str, int] = {}
    classes: dict[str, int] = {}
    found: dict[tuple[int, int], float] = {}
    for line, cells in rows:
        _check_width(path, line, cells, header)
        client, label, count = (cells[place] for place in places)
        _check_client(path, line, client)
        if not label:
            _fail(path, line, "empty, expected the name of a class", "class")
        pair = clients.setdefault(client, len(clients)), classes.setdefault(label, len(classes))
        if pair in found:
            _fail(path, line, f"client {client!r} and class {label!r} occur together a second time")
        found[pair] = _amount(path, line, "count", count)
    if not found:
        raise ArgumentError(f"{path}: nothing below the header (expected one row for a client and a class)")
    counts = np.zeros((len(clients), len(classes)))
    pairs = np.array(list(found))
    counts[pairs[:, 0], pairs[:, 1]] = list(found.values())
    names = list(classes)
    if all(name.isdecimal() for name in names):
        order = sorted(range(len(names)), key=lambda column: int(names[column]))
        counts, names = counts[:, order], [names[column] for column in order]
    return counts, list(clients), names


def _rows(path: Path) -> Iterator[Row]:
    """Rows that are not blank; cells without the spaces around them."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path}: can't be read: {error.strerror}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        _fail(path, line, "not UTF-8 text; save the file as CSV in UTF-8")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                yield reader.line_num, stripped
    except csv.Error as error:
        _fail(path, reader.line_num, f"not comma-separated text: {error}")


def _header(rows: Iterator[Row], path: Path, expected: str) -> Row:
    row = next(rows, None)
    if row is None:
        raise ArgumentError(f"{path}: the file is empty (expected {expected})")
    line, header = row
    for column, name in enumerate(header):
        if not name:
            _fail(path, line, f"column {column + 1} has no name in the header")
        if name in header[:column]:
            _fail(path, line, f"the column {name!r} occurs twice in the header")
    return row


def _check_width(path: Path, line: int, cells: list[str], header: list[str]) -> None:
    if len(cells) != len(header):
        _fail(path, line, f"{len(cells)} cells where the header has {len(header)} columns")


def _check_client(path: Path, line: int, client: str) -> None:
    if not client:
        _fail(path, line, "empty, expected the name of a client", "client")


def _check_known(path: Path, line: int, name: str, classes: Sequence[str]) -> None:
    if name not in classes:
        _fail(path, line, f"the counts have no class {name!r}{nearest(name, classes)}; give it a column of zeros there")


def _amount(path: Path, line: int, column: str, cell: str) -> float:
    try:
        amount = float(cell)
    except ValueError:
        wrong = "empty" if not cell else repr(cell)
        _fail(path, line, f"{wrong}, expected a number >= 0 (0 where there is none)", column)
    if not 0 <= amount < np.inf:
        _fail(path, line, f"{cell}, expected a finite number >= 0", column)
    return amount


def _written(amount: float) -> str:
    return str(int(amount)) if amount.is_integer() else repr(amount)


def _fail(path: Path, line: int, wrong: str, column: str | None = None) -> NoReturn:
    place = f"{path}, line {line}" + (f", column {column!r}" if column else "")
    raise ArgumentError(f"{place}: {wrong}")
