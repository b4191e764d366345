"""Label counts and target mixes as tables of text; errors name file, line and column.

What a spreadsheet makes of such a table is read too: semicolons or tabs between columns, decimal commas, thousands
separators, totals, a column "hospital" for the clients. Where that can be understood in two ways, the caller is asked.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import math
import warnings
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, NoReturn, TextIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, DataWarning, nearest
from fedskew.labels._amounts import Decimal, decimals, is_separated, number
from fedskew.labels._totals import Totals, without_totals
from fedskew.names import CLASS_WORDS, CLIENT_WORDS, COUNT_WORDS, plain, separator_of, warn_of_look_alikes

FloatArray: TypeAlias = NDArray[np.float64]

LONG = ("client", "class", "count")
_ROUNDED = 0.005
_EXAMPLES = "a wide header such as client,cat,dog, or client,class,count"
Row: TypeAlias = tuple[int, list[str]]
"""A row: its line number in the file, and its cells."""

Table: TypeAlias = tuple[FloatArray, list[str], list[str]]
"""Label counts, client names and class names."""


def read_counts(
    path: Path, client: str | None = None, decimal: Decimal | None = None, totals: Totals | None = None
) -> Table:
    """Read counts and names from a file in wide or long form; see `LabelCounts.read_csv`."""
    rows = text_rows(path)
    first, header = next(rows, (0, None))
    if header is None:
        raise ArgumentError(f"{path}: the file is empty (expected {_EXAMPLES})")
    lines = _Lines(rows)
    at = _client_column(path, first, header, client, lines)
    header[at] = header[at] or "client"
    check_header(path, first, header)
    if len(header) == 1:
        fail(path, first, f"no column for any class beside {header[0]!r}")
    long = _long_columns(header, at, lines)
    counts, clients, classes = (
        _read_wide(path, header, at, lines, decimal)
        if long is None
        else _read_long(path, header, (at, *long), lines, decimal)
    )
    counts, clients, classes = without_totals(path, counts, clients, classes, totals)
    for names, what in ((clients, "clients"), (classes, "classes")):
        warn_of_look_alikes(names, what, path)
    return counts, clients, classes


def lists_samples(path: str | Path) -> bool:
    """Return whether a table has a row for each sample, and not counts: a column of labels, and none of counts.

    Args:
        path: The file.

    Raises:
        ArgumentError: The file can't be read.
    """
    rows = text_rows(Path(path))
    _, header = next(rows, (0, []))
    words = [plain(name) for name in header]
    labels = [column for column, word in enumerate(words) if word in CLASS_WORDS]
    if not labels or COUNT_WORDS.intersection(words):
        return False
    lines = _Lines(rows)
    owners = [column for column, word in enumerate(words) if word in CLIENT_WORDS]
    return lines.is_text(labels[0]) or any(map(lines.repeats, owners))


def write_counts(
    path: Path | TextIO,
    counts: FloatArray,
    clients: Sequence[str],
    classes: Sequence[str],
    form: Literal["wide", "long"],
) -> None:
    """Write counts and names in wide or long form; see `LabelCounts.to_csv`."""
    if form not in ("wide", "long"):
        raise ArgumentError(f"form: must be 'wide' or 'long', not {form!r}")
    try:
        with path.open("w", encoding="utf-8", newline="") if isinstance(path, Path) else nullcontext(path) as file:
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


def read_target(path: str | Path, classes: Sequence[str], decimal: Decimal | None = None) -> FloatArray:
    """Read a target label mix from a file, comma-separated or as spreadsheets write them (see `LabelCounts.read_csv`).

    The file has the columns `class` and `share`, one row per class, or one row of shares under a header of class names.
    Shares sum to 1; percentages, which sum to 100, and counts are divided by their sum.

    Args:
        path: The file.
        classes: Class names; the file's classes are matched to them by name.
        decimal: The decimal sign of its numbers; None: as the file shows.

    Returns:
        The mix in the order of `classes`, shape `(classes,)`, sum 1.

    Raises:
        ArgumentError: The file can't be read; the message names file, line and column.
    """
    path = Path(path)
    rows = text_rows(path)
    expected = "class,share, or a header of class names over one row of shares"
    first, header = next(rows, (0, None))
    if header is None:
        raise ArgumentError(f"{path}: the file is empty (expected {expected})")
    check_header(path, first, header)
    named: list[str] = []
    if sorted(map(plain, header)) == ["class", "share"]:
        at = [plain(name) for name in header].index("class")
        amounts = Amounts(path, ["share"], decimal)
        for line, cells in rows:
            check_width(path, line, cells, header)
            if cells[at] in named:
                fail(path, line, f"class {cells[at]!r} occurs twice")
            _check_known(path, line, cells[at], classes)
            named.append(cells[at])
            amounts.add(line, [cells[1 - at]])
    else:
        amounts = Amounts(path, header, decimal)
        row = next(rows, None)
        if row is None:
            fail(path, first, f"nothing below the header (expected {expected})")
        check_width(path, *row, header)
        for name in header:
            _check_known(path, first, name, classes)
        named = header
        amounts.add(*row)
        more = next(rows, None)
        if more is not None:
            fail(path, more[0], f"a second row of shares (expected {expected})")
    found = dict(zip(named, amounts.table().ravel().tolist(), strict=True))
    for name in classes:
        if name not in found:
            raise ArgumentError(f"{path}: no share for class {name!r}; write 0 where the target has none of it")
    shares = np.array([found[name] for name in classes])
    if not 0 < shares.sum() < np.inf:
        raise ArgumentError(f"{path}: the shares must have a positive sum, not {shares.sum()}")
    check_shares(shares, str(path))
    mix: FloatArray = shares / shares.sum()
    return mix


def check_shares(amounts: FloatArray, name: str) -> None:
    """Refuse amounts of classes that a user wrote as shares and that don't add up.

    Args:
        amounts: What was written, shape `(classes,)`.
        name: Where, for error messages.

    Raises:
        ArgumentError: They are no whole numbers, and sum neither to 1 nor to 100, but for rounding.
    """
    total = float(amounts.sum())
    whole = bool((amounts == np.floor(amounts)).all())
    if not whole and abs(total - 1) > _ROUNDED and abs(total / 100 - 1) > _ROUNDED:
        raise ArgumentError(
            f"{name}: the shares sum to {total:.6g}; give shares that sum to 1, percentages that sum to 100, or counts"
        )


def _client_column(path: Path, line: int, header: list[str], client: str | None, lines: _Lines) -> int:
    """Return the column of client names: the one that is asked for, is called so, or is the only one of text."""
    if client is not None:
        if client not in header:
            fail(path, line, f"no column {client!r} for client{nearest(client, header)}")
        return header.index(client)
    if "client" in header:
        return header.index("client")
    called = [column for column, name in enumerate(header) if plain(name) in CLIENT_WORDS] or _unnamed(header, lines)
    if len(called) != 1:
        fail(
            path, line, "no column 'client' in the header: say by client (--client) which column names the clients, or "
            f"rename it (expected {_EXAMPLES})"
        )  # fmt: skip
    name = header[called[0]]
    if name and not plain(name).startswith("client"):
        warnings.warn(f"{path}: clients are named by the column {name!r}", DataWarning, stacklevel=4)
    return called[0]


def _unnamed(header: list[str], lines: _Lines) -> list[int]:
    """Return the columns that may name the clients, where none is called so."""
    words = [plain(name) for name in header]
    free = [column for column, word in enumerate(words) if word not in CLASS_WORDS | COUNT_WORDS]
    if len(header) == 3 and CLASS_WORDS.intersection(words) and COUNT_WORDS.intersection(words):
        return free
    text = [column for column in free if lines.is_text(column)]
    if header[0] == "" and text in ([], [0]):  # the index of a table of pandas or R
        return [0]
    if all(decimals(name) for column, name in enumerate(header) if [column] != text):
        return []  # the header is a row of counts
    return text


def _long_columns(header: list[str], at: int, lines: _Lines) -> tuple[int, int] | None:
    """Return the columns of classes and counts where a row is a client and a class; None where the table is wide."""
    if len(header) != 3:
        return None
    for label, count in itertools.permutations([column for column in range(3) if column != at]):
        is_class, is_count = plain(header[label]) in CLASS_WORDS, plain(header[count]) in COUNT_WORDS
        if (is_class and is_count) or ((is_class or is_count) and lines.is_text(label) and not lines.is_text(count)):
            return label, count
    return None


def _read_wide(path: Path, header: list[str], at: int, rows: Iterable[Row], decimal: Decimal | None) -> Table:
    classes = header[:at] + header[at + 1 :]
    samples = "" if len(header) > 3 else f"; if each row is one sample, count them: fedskew counts {path}"
    lines: dict[str, int] = {}
    amounts = Amounts(path, classes, decimal)
    for line, cells in rows:
        check_width(path, line, cells, header)
        client = cells.pop(at)
        _check_client(path, line, client, header[at])
        if client in lines:
            fail(path, line, f"client {client!r} occurs twice; its first row is line {lines[client]}{samples}")
        lines[client] = line
        amounts.add(line, cells)
    if not lines:
        raise ArgumentError(f"{path}: no client below the header (expected one row a client)")
    return amounts.table(), list(lines), classes


def _read_long(
    path: Path, header: list[str], places: tuple[int, int, int], rows: Iterable[Row], decimal: Decimal | None
) -> Table:
    clients: dict[str, int] = {}
    classes: dict[str, int] = {}
    pairs: dict[tuple[int, int], None] = {}
    amounts = Amounts(path, [header[places[2]]], decimal)
    for line, cells in rows:
        check_width(path, line, cells, header)
        client, label, count = (cells[place] for place in places)
        _check_client(path, line, client, header[places[0]])
        if not label:
            fail(path, line, "empty, expected the name of a class", header[places[1]])
        pair = clients.setdefault(client, len(clients)), classes.setdefault(label, len(classes))
        if pair in pairs:
            fail(path, line, f"client {client!r} and class {label!r} occur together a second time")
        pairs[pair] = None
        amounts.add(line, [count])
    if not pairs:
        raise ArgumentError(f"{path}: nothing below the header (expected one row for a client and a class)")
    counts = np.zeros((len(clients), len(classes)))
    places_found = np.array(list(pairs))
    counts[places_found[:, 0], places_found[:, 1]] = amounts.table()[:, 0]
    names = list(classes)
    if all(name.isdecimal() for name in names):
        order = sorted(range(len(names)), key=lambda column: int(names[column]))
        counts, names = counts[:, order], [names[column] for column in order]
    return counts, list(clients), names


class _Lines:
    """The rows below a header, of which some questions can be asked before they are read."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows: Iterable[Row] = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def is_text(self, column: int) -> bool:
        """Return whether a column has cells, and none of them is a number."""
        cells = self._column(column)
        return bool(cells) and not any(map(decimals, cells))

    def repeats(self, column: int) -> bool:
        """Return whether two cells of a column are the same."""
        cells = self._column(column)
        return len(set(cells)) < len(cells)

    def _column(self, column: int) -> list[str]:
        """Return the cells of a column that are not empty."""
        if not isinstance(self._rows, list):
            self._rows = list(self._rows)
        return [cells[column] for _, cells in self._rows if column < len(cells) and cells[column]]


class Amounts:
    """Numbers of a table, row by row; the file's one decimal sign is found out where it is not given.

    Args:
        path: The file, for messages.
        columns: Names of the columns that hold numbers.
        decimal: The decimal sign; None: as the file shows.
    """

    def __init__(self, path: Path, columns: Sequence[str], decimal: Decimal | None) -> None:
        if decimal not in (None, ".", ","):
            raise ArgumentError(f"decimal: must be '.' or ',', not {decimal!r}")
        self._path, self._columns = path, columns
        self._values, self._lines = array("d"), array("q")
        self._given = decimal
        self._shown: dict[Decimal, str] = {}
        self._open: list[tuple[int, str]] = []

    def add(self, line: int, cells: list[str]) -> None:
        """Read the cells of one row, as many as there are columns."""
        self._lines.append(line)
        if not is_separated("".join(cells)):
            try:
                self._values.extend(list(map(float, cells)))
                return
            except ValueError:
                pass  # a space between thousands, or no number
        for column, cell in enumerate(cells):
            self._values.append(self._read(line, column, cell))

    def table(self) -> FloatArray:
        """Return all numbers, shape `(rows, columns)`, once the last row is in."""
        if len(self._shown) == 2:
            both = " and ".join(self._shown.values())
            raise ArgumentError(f"{self._path}: writes decimals in two ways, {both}; make them one")
        decimal = self._given or next(iter(self._shown), None)
        for place, cell in self._open:
            line, column = divmod(place, len(self._columns))
            if decimal is None:
                wrong = (
                    f"{cell!r} may be {number(cell, '.'):g} or {number(cell, ','):g}, and no other number of the file "
                    "tells; say by decimal (--decimal) whether its decimal sign is '.' or ','"
                )
                fail(self._path, self._lines[line], wrong, self._columns[column])
            self._values[place] = number(cell, decimal)
        values = np.frombuffer(self._values).reshape(-1, len(self._columns))
        illegal = ~((values >= 0) & (values < np.inf))
        if illegal.any():
            line, column = np.argwhere(illegal)[0]
            wrong = f"{values[line, column]:.10g}, expected a finite number >= 0"
            fail(self._path, self._lines[line], wrong, self._columns[column])
        return values

    def _read(self, line: int, column: int, cell: str) -> float:
        """Return a number; NaN for the time being where its decimal sign is not known yet."""
        known = [self._given] if self._given else decimals(cell)
        if is_separated(cell) and not self._given and known:
            if len(known) == 2:
                self._open.append((len(self._values), cell))
                return math.nan
            self._shown.setdefault(known[0], f"{cell} in line {line}")
        try:
            return number(cell, known[0]) if known else float(cell)
        except ValueError:
            wrong = "empty" if not cell else repr(cell)
            sign = f" with the decimal sign {self._given!r}" if self._given else ""
            where = self._columns[column]
            samples = (
                f"; if each row is one sample, count them: fedskew counts {self._path}"
                if plain(where) in CLASS_WORDS
                else ""
            )
            fail(self._path, line, f"{wrong}, expected a number{sign} >= 0 (0 where there is none){samples}", where)


def text_rows(path: Path) -> Iterator[Row]:
    """Rows that are not blank; cells without the spaces around them."""
    text = _text(path)
    separator = separator_of(text, path)
    if text[:5].lower() == f"sep={separator}":  # Excel's word to itself
        text = text[5:]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                yield reader.line_num, stripped
    except csv.Error as error:
        fail(path, reader.line_num, f"not comma-separated text: {error}")


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path}: can't be read: {error.strerror}") from None
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        fail(path, line, "not UTF-8 text; save the file as CSV in UTF-8")


def check_header(path: Path, line: int, header: list[str]) -> None:
    for column, name in enumerate(header):
        if not name:
            fail(path, line, f"column {column + 1} has no name in the header")
        if name in header[:column]:
            fail(path, line, f"the column {name!r} occurs twice in the header")


def check_width(path: Path, line: int, cells: list[str], header: list[str]) -> None:
    if len(cells) != len(header):
        fail(path, line, f"{len(cells)} cells where the header has {len(header)} columns")


def _check_client(path: Path, line: int, client: str, column: str) -> None:
    if not client:
        fail(path, line, "empty, expected the name of a client", column)


def _check_known(path: Path, line: int, name: str, classes: Sequence[str]) -> None:
    if name not in classes:
        fail(path, line, f"the counts have no class {name!r}{nearest(name, classes)}; give it a column of zeros there")


def _written(amount: float) -> str:
    """Return the number, written so that it can't be taken for thousands."""
    if amount.is_integer():
        return str(int(amount))
    text = repr(amount)
    return f"{text}0" if is_separated(text) and len(decimals(text)) == 2 else text


def fail(path: Path, line: int, wrong: str, column: str | None = None) -> NoReturn:
    place = f"{path}, line {line}" + (f", column {column!r}" if column else "")
    raise ArgumentError(f"{place}: {wrong}")
