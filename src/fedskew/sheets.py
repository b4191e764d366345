"""Tables of text as people and spreadsheets write them; a mistake is one line that names file, line and column.

Columns may be apart by commas, semicolons, tabs or bars, numbers may have decimal commas and thousands separators, and
none is guessed: `1,234` is 1234 in English and 1.234 in German. A file's other numbers mostly tell which (`2,5` and
`1.234.567` do); where none does, the caller is asked.
"""

import codecs
import csv
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, FedskewError, nearest
from fedskew.names import CLASS_WORDS, plain
from fedskew.tables import counted

Decimal: TypeAlias = Literal[".", ","]
FloatArray: TypeAlias = NDArray[np.float64]

_KEPT = 1 << 24  # characters of a file whose rows are kept, not read anew
_SEPARATORS = ",;\t|"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+")
_SPACES = " \u00a0\u2009\u202f'\u2019"
_SIGNS: tuple[tuple[Decimal, Decimal], ...] = ((".", ","), (",", "."))
_FORMS: dict[Decimal, re.Pattern[str]] = {
    decimal: re.compile(
        rf"[+-]?(?:\d+(?:[{decimal}]\d*)?(?:[eE][+-]?\d+)?|[{decimal}]\d+|"
        rf"[1-9]\d{{0,2}}(?:[{thousands}]\d{{3}})+(?:[{decimal}]\d+)?|"
        rf"[1-9]\d{{0,2}}(?:[{_SPACES}]\d{{3}})+(?:[{decimal}]\d+)?)"
    )
    for decimal, thousands in _SIGNS
}
"""A number by its decimal sign: plain, or with thousands apart by the other sign, spaces or apostrophes."""


class Sheet:
    """A table below a header line, in UTF-8 or UTF-16; it can be gone through several times.

    Iterating gives the rows that are not blank: line number, and as many cells as the header has, without spaces around
    them. Columns at the right end that hold nothing are none.

    Args:
        decimal: The decimal sign of its numbers; None: as the file shows.
        error: What is raised where it can't be read.
    """

    def __init__(
        self, path: Path, expected: str, decimal: Decimal | None = None, error: type[FedskewError] = ArgumentError
    ) -> None:
        if decimal not in (None, ".", ","):
            raise ArgumentError(f"decimal: must be '.' or ',', not {decimal!r}")
        self.path, self.expected, self._decimal, self._error = path, expected, decimal, error
        self._kept: list[tuple[int, list[str]]] | None = None
        self._text = self._decoded()
        self._separator = self._found_separator()
        if self._text[:5].lower() == f"sep={self._separator}":  # Excel's word to itself
            self._text = self._text[5:]
        self.line, self.header = next(self._rows(), (0, []))
        if not self.header:
            raise error(f"{path}: the file is empty (expected {expected})")
        if not self.header[-1]:
            del self.header[max(at for _, cells in self._rows() for at, cell in enumerate(cells, 1) if cell) :]

    def fail(self, line: int, wrong: str, column: str | None = None) -> NoReturn:
        """Raise the error that names this place."""
        raise self._error(f"{self.path}, line {line}" + (f", column {column!r}" if column else "") + f": {wrong}")

    def fail_row(self, row: int, wrong: str, column: str | None = None) -> NoReturn:
        """Raise the error that names a place by its row, from 0."""
        self.fail(self.line_of(row), wrong, column)

    def line_of(self, row: int) -> int:
        """Return the line of a row, from 0."""
        return next(islice(self, row, None))[0]

    def check_header(self, unnamed: bool = False) -> None:
        """Refuse a header in which a name occurs twice or, unless `unnamed`, is missing."""
        before = set[str]()
        for column, name in enumerate(self.header):
            if not name and not unnamed:
                self.fail(self.line, f"column {column + 1} has no name in the header")
            if name in before:
                self.fail(self.line, f"the column {name!r} occurs twice in the header")
            before.add(name)

    def column(self, what: str, words: frozenset[str], name: str | None = None) -> int | None:
        """Find a column, see `find_column`."""
        try:
            return find_column(self.header, what, words, name)
        except ArgumentError as error:
            self.fail(self.line, str(error))

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        if self._kept is None and len(self._text) <= _KEPT:
            self._kept = list(islice(self._rows(), 1, None))
        for line, cells in self._kept or islice(self._rows(), 1, None):
            if len(cells) < len(self.header) or any(cells[len(self.header) :]):
                self.fail(line, f"{counted(len(cells), 'cell')} where the header has {len(self.header)}")
            yield line, cells[: len(self.header)]

    def is_text(self, column: int) -> bool:
        """Return whether a column has cells, and none of them is a number."""
        cells = [cells[column] for _, cells in self if cells[column]]
        return bool(cells) and not any(map(decimals, cells))

    def texts(self, column: int, what: str) -> list[str]:
        """Return the cells of a column of names, none of which may be empty."""
        found = []
        for line, cells in self:
            if not cells[column]:
                self.fail(line, f"empty, expected the name of a {what}", self.header[column])
            found.append(cells[column])
        return found or self.fail(self.line, f"nothing below the header (expected {self.expected})")

    def amounts(self, columns: Sequence[int]) -> FloatArray:
        """Return the numbers >= 0 of some columns, such as an int64 holds, shape `(rows, columns)`."""
        decimal, values = self._decimal or self.decimal_sign(columns), array("d")
        for line, row in self:
            cells = [row[column] for column in columns]
            with suppress(ValueError):  # a space between thousands, or no number
                if not _is_separated("".join(cells)):
                    values.extend(list(map(float, cells)))
                    continue
            for column, cell in zip(columns, cells, strict=True):
                try:
                    values.append(number(cell, decimal))
                except ValueError:
                    self._refuse(line, self.header[column], cell)
        if not values:
            self.fail(self.line, f"nothing below the header (expected {self.expected})")
        table = np.frombuffer(values).reshape(-1, len(columns))
        if (illegal := ~((table >= 0) & (table < 2.0**63))).any():
            at, column = np.argwhere(illegal)[0]
            wrong = f"{table[at, column]:.10g}, expected a finite number >= 0, below 2^63"
            self.fail_row(at, wrong, self.header[columns[column]])
        return table

    def decimal_sign(self, columns: Sequence[int]) -> Decimal:
        """Return the decimal sign that the numbers of some columns show; refuse two, and numbers that may be two."""
        shown: dict[Decimal, str] = {}
        unclear: tuple[int, str, str] | None = None
        for line, row in self:
            for column in columns:
                cell = row[column]
                signs = decimals(cell) if _is_separated(cell) else []
                if len(signs) == 1:
                    shown.setdefault(signs[0], f"{cell} in line {line}")
                elif signs and unclear is None:
                    unclear = line, cell, self.header[column]
        if len(shown) == 2:
            both = " and ".join(shown.values())
            raise self._error(f"{self.path}: writes decimals in two ways, {both}; make them one")
        if unclear and not shown:
            line, cell, name = unclear
            either = f"{number(cell, '.'):g} or {number(cell, ','):g}"
            self.fail(
                line,
                f"{cell!r} may be {either}, and no other number of the file tells; say by decimal (--decimal) whether "
                "its decimal sign is '.' or ','",
                name,
            )
        return next(iter(shown), ".")

    def _refuse(self, line: int, column: str, cell: str) -> NoReturn:
        """Raise the error that a cell holds no number."""
        sign = f" with the decimal sign {self._decimal!r}" if self._decimal else ""
        samples = ""
        if plain(column) in CLASS_WORDS:
            samples = f"; if each row is one sample, count them: fedskew counts {self.path}"
        wrong = repr(cell) if cell else "empty"
        self.fail(line, f"{wrong}, expected a number{sign} >= 0 (0 where there is none){samples}", column)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        lines = (found[0] for found in _LINE.finditer(self._text))
        reader = csv.reader(lines, delimiter=self._separator, strict=True)
        try:
            for cells in reader:
                stripped = [cell.strip() for cell in cells]
                if any(stripped):
                    yield reader.line_num, stripped
        except csv.Error as error:
            self.fail(reader.line_num, f"not comma-separated text: {error}")

    def _decoded(self) -> str:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise self._error(f"{self.path}: can't be read: {error.strerror}") from None
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        try:
            return content.decode("utf-16" if wide else "utf-8-sig")
        except UnicodeDecodeError as error:
            self.fail(content[: error.start].count(b"\n") + 1, "not UTF-8 text; save the file as CSV in UTF-8")

    def _found_separator(self) -> str:
        """Return what stands between the columns: what Excel's `sep=` says, or what the header has most of."""
        if re.match(rf"sep=[{_SEPARATORS}]", self._text[:5], re.IGNORECASE):
            return self._text[4]
        header = next((found[0] for found in _LINE.finditer(self._text) if found[0].strip()), "")
        bare = re.sub(r'"[^"]*"', "", header)
        weight = {sign: ("client" in map(plain, bare.split(sign)), bare.count(sign)) for sign in _SEPARATORS}
        best = [sign for sign in _SEPARATORS if sign in bare and weight[sign] == max(weight.values())]
        if len(best) > 1:
            raise self._error(
                f"{self.path}: columns may be apart by {' or '.join(map(repr, best))}; put names that hold one of them "
                "in quotes, or call the clients' column 'client'"
            )
        return best[0] if best else ","


def find_column(header: Sequence[str], what: str, words: frozenset[str], name: str | None = None) -> int | None:
    """Find the column of clients, labels or the like: `what` it holds, the preferred name and the option that says
    which, or one of `words`, as `names.plain` writes them; None where there is none."""
    if name is not None:
        if name not in header:
            raise ArgumentError(f"no column {name!r} for {what}{nearest(name, header)}")
        return header.index(name)
    called = [column for column, title in enumerate(header) if plain(title) in words]
    found = [column for column in called if header[column] == what] or called
    if len(found) > 1:
        names = ", ".join(header[column] for column in found)
        raise ArgumentError(f"several columns may be the {what} ({names}); say by --{what} which it is, or rename")
    return next(iter(found), None)


def columns_in(text: str, header: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a text names: one, or several apart by commas."""
    return (text,) if text in header or "," not in text else tuple(map(str.strip, text.split(",")))


def decimals(text: str) -> list[Decimal]:
    """Return the decimal signs with which a cell can be read as a number; none where it is no number."""
    return [decimal for decimal, form in _FORMS.items() if form.fullmatch(text)]


def written(amount: float) -> str:
    """Return a number, written so that it can't be taken for thousands."""
    if amount.is_integer():
        return str(int(amount))
    text = repr(amount)
    return f"{text}0" if _is_separated(text) and len(decimals(text)) == 2 else text


def _is_separated(text: str) -> bool:
    """Return whether a cell has a decimal or thousands sign that may be read in two ways, or Python's of thousands."""
    return "." in text or "," in text or "_" in text


def number(text: str, decimal: Decimal) -> float:
    """Return the number that a cell holds; raise ValueError if it is none with that decimal sign."""
    if not _FORMS[decimal].fullmatch(text):
        if _is_separated(text):
            raise ValueError(text)
        return float(text)  # nan, inf, or no number at all
    thousands = "," if decimal == "." else "."
    return float(re.sub(f"[{_SPACES}{thousands}]", "", text).replace(decimal, "."))
