"""Tables of samples, one a row: from CSV, Parquet, data frames or rows of Python, each cell as text."""

import glob
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError, DataError, in_one_line, optional
from fedskew.sheets import Decimal, Sheet, number

PARQUET = {".parquet", ".pq"}
SUFFIXES = {".csv", ".tsv", ".txt", *PARQUET}
"""Of the files that are tables."""

_TEXTS = {"<NA>": "", "NaT": ""}


@dataclass(frozen=True)
class Table:
    """A table: its cells as text by column, "" where there is none; and where a row stands, for messages. Other than
    text is written as Python does, but a whole number without a point: 1.0 as "1"."""

    where: str
    columns: Mapping[str, Sequence[str]]
    sheet: Sheet | None = None
    decimal: Decimal | None = None

    @staticmethod
    def read(path: Path, decimal: Decimal | None = None) -> "Table":
        """Read a file; what is no Parquet is CSV, and a folder is one that `save_to_disk` of `datasets` wrote.

        `decimal` is the decimal sign of its numbers; None: as it shows.
        """
        if is_saved(path):
            return _of_saved(path)
        if path.suffix.lower() in PARQUET:
            return _of_parquet(path)
        if path.suffix.lower() == ".toml":
            raise DataError(f"{path}: is TOML, and no table; give CSV or Parquet files, or a folder of them")
        sheet = Sheet(path, "a header line, then one sample a line", error=DataError)
        sheet.check_header(unnamed=True)
        rows = [cells for _, cells in sheet]
        if not rows:
            sheet.fail(sheet.line, "nothing below the header (expected a header line, then one sample a line)")
        columns = dict(zip(sheet.header, map(list, zip(*rows, strict=True)), strict=True))
        return Table(str(path), columns, sheet, decimal)

    @staticmethod
    def of(rows: Any) -> "Table":
        """Convert a data frame of pandas or polars, or a list of one dict a row."""
        if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
            return Table("rows", {str(name): [_text(cell) for cell in rows[name]] for name in rows.columns})
        found = [rows] if isinstance(rows, Mapping) else list(rows)
        if not found or not all(isinstance(row, Mapping) for row in found):
            raise ArgumentError("rows: expected one dict a row, at least one, or a data frame")
        names = dict.fromkeys(str(name) for row in found for name in row)
        return Table("rows", {name: [_text(row.get(name)) for row in found] for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def names(self) -> list[str]:
        """Name each sample by its file and line."""
        if self.sheet is None:
            return [f"{self.where}, row {row + 1}" for row in range(len(self))]
        return [f"{self.where}:{line}" for line, _ in self.sheet]

    def place(self, row: int) -> str:
        """Name the place of a row, from 0, in its file, where the first is row 1."""
        return f"row {row + 1}" if self.sheet is None else f"line {self.sheet.line_of(row)}"

    def fail(self, wrong: str, row: int | None = None, column: str | None = None) -> NoReturn:
        """Raise the DataError that names a place: the header, or a row from 0."""
        if self.sheet is not None:
            self.sheet.fail(self.sheet.line if row is None else self.sheet.line_of(row), wrong, column)
        place = self.where if row is None else f"{self.where}, {self.place(row)}"
        raise DataError(f"{place}{'' if column is None else f', column {column!r}'}: {wrong}")

    def texts(self, column: str, what: str) -> Sequence[str]:
        """Return the cells of a column of names, none of which may be empty."""
        cells = self.columns[column]
        if "" in cells:
            self.fail(f"empty, expected the name of a {what}", list(cells).index(""), column)
        return cells

    def absent(self, column: str, missing: Collection[str], known: Collection[str] = ()) -> NDArray[np.bool_]:
        """Return which cells of a column count as missing: they are in `missing`, in small letters, and not known."""
        cells = self.columns[column]
        gone = {cell for cell in set(cells) if cell.casefold() in missing and cell not in known}
        return np.array([cell in gone for cell in cells], bool) if gone else np.zeros(len(cells), bool)

    def sign(self, columns: Sequence[str]) -> Decimal:
        """Return the decimal sign of the numbers in some columns."""
        if self.decimal or self.sheet is None:
            return self.decimal or "."
        if not any("," in cell for name in columns for cell in self.columns[name]):
            return "."
        return self.sheet.decimal_sign([self.sheet.header.index(name) for name in columns])

    def numbers(self, column: str, absent: NDArray[np.bool_], sign: Decimal, wrong: str) -> NDArray[np.float64]:
        """Return the finite numbers of a column, NaN where they are absent; `wrong` says what another cell is not."""
        cells = self.columns[column]
        if absent.any():
            cells = ["nan" if gone else cell for cell, gone in zip(cells, absent, strict=True)]
        try:
            if sign == ",":
                raise ValueError
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = self._one_by_one(column, cells, sign, wrong)
        odd = ~np.isfinite(values) & ~absent
        if odd.any():
            row = int(odd.argmax())
            self.fail(f"{values[row]} is not a finite number", row, column)
        return values

    def _one_by_one(self, column: str, cells: Sequence[str], sign: Decimal, wrong: str) -> NDArray[np.float64]:
        values = np.empty(len(cells))
        for row, cell in enumerate(cells):
            try:
                values[row] = number(cell, sign)
            except ValueError:
                self.fail(f"{cell!r} is {wrong}", row, column)
        return values

    def days(self, column: str, absent: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the dates of a column, written as 2024-12-31, as days since 1970; NaN where they are absent."""
        values = np.full(len(self), np.nan)
        for row, (cell, gone) in enumerate(zip(self.columns[column], absent, strict=True)):
            if not gone and (days := days_of(cell)) is None:
                self.fail(f"{cell!r} is no date such as 2024-12-31", row, column)
            elif not gone:
                values[row] = days
        return values


def place_among(tables: Sequence[Table], row: int) -> str:
    """Name the place of a row, from 0, of tables below each other, with its file."""
    ends = np.cumsum([len(table) for table in tables])
    at = int(np.searchsorted(ends, row, side="right"))
    return f"{Path(tables[at].where).name}, {tables[at].place(row - int(ends[at]) + len(tables[at]))}"


def days_of(cell: str) -> float | None:
    """Return the days from 1970 to a date of ISO 8601; None where it is none."""
    try:
        found = datetime.fromisoformat(cell).replace(tzinfo=None)
    except ValueError:
        return None
    return (found - datetime(1970, 1, 1)).total_seconds() / 86400


def table_files(root: Path, leave_out: Path | None = None) -> list[Path]:
    """Return the files of a table, sorted: one, a folder's, or those that a pattern such as sites/*.csv names."""
    if root.is_file() or not (root.is_dir() or glob.has_magic(str(root))):
        return [root]
    below = root.iterdir() if root.is_dir() else map(Path, glob.glob(str(root)))
    is_table = (path for path in below if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in is_table if path != leave_out and not path.name.startswith("."))


def _of_parquet(path: Path) -> Table:
    parquet = optional("pyarrow.parquet", f"{path}: reading Parquet needs pyarrow: pip install 'fedskew[parquet]'")
    try:
        found = parquet.read_table(path)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or in_one_line(error)}") from None
    except Exception as error:  # a damaged file can raise almost anything
        raise DataError(f"{path}: can't be read as Parquet: {in_one_line(error)}") from None
    if not found.num_rows:
        raise DataError(f"{path}: has no row")
    if len(set(found.column_names)) < found.num_columns:
        raise DataError(f"{path}: a column's name occurs twice")
    return Table(str(path), {name: [_text(cell) for cell in found[name].to_pylist()] for name in found.column_names})


def datasets_package() -> Any:
    return optional("datasets", "tables of Hugging Face need datasets: pip install 'fedskew[hf]'")


def is_saved(path: Path) -> bool:
    """Return whether a folder is one that `save_to_disk` of the package `datasets` wrote."""
    return any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def saved_table(path: Path) -> Any:
    """Read a folder that `save_to_disk` wrote."""
    try:
        return datasets_package().load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is no folder that save_to_disk of datasets wrote ({error})") from None


def saved_part(path: Path) -> Any:
    """Read a saved table of one part."""
    table = saved_table(path)
    if isinstance(table, dict):
        raise DataError(f"{path}: holds several parts; give one: {' or '.join(str(path / name) for name in table)}")
    return table.with_format(None)


def _of_saved(path: Path) -> Table:
    """Return the columns of a saved table that hold single values."""
    table, columns = saved_part(path), dict[str, list[str]]()
    for name, feature in table.features.items():
        values = table[name] if type(feature).__name__ in ("Value", "ClassLabel") else []
        if hasattr(feature, "int2str"):
            values = [None if value is None else feature.int2str(value) for value in values]
        cells = [_text(int(cell) if isinstance(cell, bool) else cell) for cell in values]
        columns |= {name: cells} if len(cells) == len(table) else {}
    return Table(str(path), columns)


def _text(cell: Any) -> str:
    """Return a cell as text; a whole number has no point, as a column of them is one of floats where some miss."""
    value = cell.item() if isinstance(cell, np.generic) else cell
    if isinstance(value, float):
        return "" if value != value else str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, date | datetime):
        value = value.isoformat() if value == value else ""
    return "" if value is None else _TEXTS.get(str(value), str(value)).strip()
