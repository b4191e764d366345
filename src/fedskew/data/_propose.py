"""A schema proposed for tables by reading them, and what is unclear about their columns, in sentences."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedskew.data._labels import as_classes
from fedskew.data._schema import MISSING, Column, TableSchema, listed
from fedskew.data._table import Table, days_of, table_files
from fedskew.errors import ArgumentError, DataError, nearest
from fedskew.names import CLASS_WORDS, CLIENT_WORDS, plain
from fedskew.sheets import Decimal, columns_in, decimals
from fedskew.tables import counted

MOST_CATEGORIES, MOST_CLASSES = 50, 100
CODES = 10
"""So many different whole numbers or fewer may be codes of categories."""
ENOUGH = 20
"""Rows from which on a column without a value twice looks like one of identifiers."""
IDENTIFIER = re.compile(r"(?i:(?:^|[\W_])(?:id|uuid|guid|mrn|nr|no|index|row))$|[a-z]I[dD]$")


@dataclass
class Proposal:
    """A schema for tables, and what is unclear in it: one sentence a line, each about one column or file."""

    schema: TableSchema
    unclear: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the schema as a TOML file, with a comment on how it was made."""
        top = "# What the columns of the tables hold: read it through, and correct it. Kinds: number, category, date,"
        return f"{top}\n# label, client, ignored. docs/data.md says what each key means.\n{self.schema.toml()}"

    @staticmethod
    def of_files(
        files: Sequence[Path],
        label: str | tuple[str, ...] | None = None,
        client: str | None = None,
        decimal: Decimal | None = None,
        separator: str | None = None,
    ) -> "Proposal":
        """Propose a schema for tables that are to be read as one.

        Args:
            files: CSV or Parquet files, folders of them, or patterns such as sites/*.csv.
            label: Column of labels, or several of 0 and 1, which may be apart by commas; None: the one that is called
                so, as for `client`.
            decimal: Decimal sign of numbers in CSV; None: as each file shows.
            separator: Sign between the labels in a cell, where a sample may have several.

        Raises:
            DataError: A file can't be read, a named column is not there, or no column is left to learn from.
        """
        found = [path for root in files for path in table_files(root)]
        if not found:
            raise DataError(f"{files[0]}: there is no CSV or Parquet file")
        tables = [Table.read(path, decimal) for path in found]
        names = list(dict.fromkeys(name for table in tables for name in table.columns))
        labels = () if label is None else columns_in(label, names) if isinstance(label, str) else label
        for option, named in (*(("label", name) for name in labels), ("client", client)):
            if named is not None and named not in names:
                raise DataError(f"{tables[0].where}: no column {named!r} of {option}s{nearest(named, names)}")
        labels = labels or tuple(filter(None, [_named(names, "label", CLASS_WORDS)]))
        client = client or _named([name for name in names if name not in labels], "client", CLIENT_WORDS)
        unclear: list[str] = []
        if not labels:
            unclear.append(
                'no column is called label, class or the like; give one of them kind = "label" (or --label NAME)'
            )
        signs = {table.where: _sign(table, {*labels, client}) for table in tables}
        unclear += [f"{where}: its decimal sign is a comma" for where, sign in signs.items() if sign == ","]
        columns = {}
        for name in names:
            seen = _Seen.of(name, tables)
            if name in labels:
                columns[name] = _labels(seen, unclear) if len(labels) == 1 and separator is None else Column("label")
            elif name == client:
                columns[name] = Column("client")
            else:
                columns[name] = _column(seen, [signs[table.where] for table in seen.tables], len(tables), unclear)
        try:
            return Proposal(TableSchema(columns), unclear)
        except ArgumentError as error:
            raise DataError(f"{tables[0].where}: {error} ({'; '.join(unclear)})") from None


@dataclass(frozen=True)
class _Seen:
    """A column as the tables that have it show it: the cells that are there, by table, and what was missing."""

    name: str
    tables: list[Table]
    cells: list[list[str]]
    missing: Counter[str]

    @staticmethod
    def of(name: str, tables: Sequence[Table]) -> "_Seen":
        having = [table for table in tables if name in table.columns]
        cells = [[cell for cell in table.columns[name] if cell.casefold() not in MISSING] for table in having]
        gone = Counter(cell for table in having for cell in table.columns[name] if cell.casefold() in MISSING)
        return _Seen(name, having, cells, gone)

    @property
    def distinct(self) -> dict[str, None]:
        return dict.fromkeys(cell for part in self.cells for cell in part)

    @property
    def size(self) -> int:
        return sum(map(len, self.cells))

    def kinds(self) -> list[str]:
        """Return what each table with cells has there: "number", "date" or "text"."""
        return [_kind(part) for part in self.cells if part]


def _kind(cells: Iterable[str]) -> str:
    if all(decimals(cell) or _is_float(cell) for cell in cells):
        return "number"
    return "date" if all(days_of(cell) is not None for cell in cells) else "text"


def _is_float(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _named(names: Sequence[str], what: str, words: frozenset[str]) -> str | None:
    """Return the column that is called like one of labels or clients; None where there is none, or several."""
    found = [name for name in names if name == what] or [name for name in names if plain(name) in words]
    return found[0] if len(found) == 1 else None


def _sign(table: Table, names: Collection[str | None]) -> Decimal:
    there = {name: [cell for cell in cells if cell.casefold() not in MISSING] for name, cells in table.columns.items()}
    # The labels 1.0 and 2.0 are names, whatever the sign of numbers is.
    return table.sign([name for name, cells in there.items() if name not in names and _kind(cells) == "number"])


def _labels(seen: _Seen, unclear: list[str]) -> Column:
    if seen.missing:
        unclear.append(
            f"{seen.name!r}: {counted(seen.missing.total(), 'label is', 'labels are')} missing; "
            "missing_labels = 'drop' leaves these rows out"
        )
    (names,) = as_classes(seen.tables[0].where, [cell for part in seen.cells for cell in part])
    classes = ordered(dict.fromkeys(map(str, names)))
    if len(classes) > MOST_CLASSES:
        unclear.append(f"{seen.name!r}: {len(classes)} different labels, too many to list; are they classes?")
        return Column("label")
    return Column("label", tuple(classes))


def _column(seen: _Seen, signs: Sequence[Decimal], tables: int, unclear: list[str]) -> Column:
    """Propose one column that holds neither labels nor clients."""
    name, distinct, ignored = seen.name, seen.distinct, Column("ignored")

    def leave_out(why: str) -> Column:
        unclear.append(f"{name!r}: {why}; ignored")
        return ignored

    if not distinct:
        return leave_out("has no value")
    if len(seen.tables) < tables:
        return leave_out(f"is in {len(seen.tables)} of {tables} files only, as {seen.tables[0].where}")
    if not name:
        return leave_out("a column without a name, as row numbers have")
    if len(distinct) == 1 and not seen.missing:
        return leave_out(f"is {next(iter(distinct))!r} in every row")
    if why := _why_identifier(seen):
        return leave_out(why)
    kinds = seen.kinds()
    if len(set(kinds)) > 1:
        at = kinds.index("text") if "text" in kinds else 0
        where = [table for table, cells in zip(seen.tables, seen.cells, strict=True) if cells][at].where
        both = " and ".join(f"{kind}s" for kind in sorted(set(kinds)))
        unclear.append(f"{name!r}: holds {both}: {kinds[at]} in {where}")
        kinds = ["text"]
    if seen.missing:
        tokens = ", ".join(f"{token!r} {number}" for token, number in seen.missing.most_common(4))
        unclear.append(f"{name!r}: {counted(seen.missing.total(), 'cell counts', 'cells count')} as missing ({tokens})")
    if kinds[0] == "date":
        unclear.append(f'{name!r}: dates, ignored; kind = "date" takes them as days since 1970')
        return ignored
    if kinds[0] == "number":
        return _number(seen, signs, unclear)
    categories = ordered(distinct)
    if len(categories) > MOST_CATEGORIES:
        return leave_out(f"text of {len(categories)} different values, such as {categories[0][:40]!r}")
    twins = Counter(" ".join(one.casefold().split()) for one in categories)
    if alike := [one for one in categories if twins[" ".join(one.casefold().split())] > 1]:
        unclear.append(f"{name!r}: {listed(alike)} are different categories; write them alike if they are one")
    return Column("category", tuple(categories), bool(seen.missing))


def _number(seen: _Seen, signs: Sequence[Decimal], unclear: list[str]) -> Column:
    values = np.concatenate([
        replace(table, columns={seen.name: cells}).numbers(seen.name, np.zeros(len(cells), bool), sign, "no number")
        for table, cells, sign in zip(seen.tables, seen.cells, signs, strict=True)
    ])  # fmt: skip
    found = np.unique(values)
    if 2 < len(found) <= CODES and len(values) > 3 * len(found) and (found == np.rint(found)).all():
        codes = ", ".join(f'"{value:g}"' for value in found)
        unclear.append(
            f"{seen.name!r}: {len(found)} whole numbers, taken as amounts; if they are codes: "
            f'kind = "category", categories = [{codes}]'
        )
    if found[-1] in (99, 999, 9999, 99999) or found[0] in (-1, -9, -99, -999, -9999):
        odd = found[-1] if found[-1] in (99, 999, 9999, 99999) else found[0]
        unclear.append(f'{seen.name!r}: {odd:g} may stand for a missing value; then add "{odd:g}" to missing')
    return Column("number", missing=bool(seen.missing), range=_range(float(found[0]), float(found[-1])))


def _range(low: float, high: float) -> tuple[float, float]:
    """Return a range that is three times as wide as the values, in round numbers; it does not cross 0 for that."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span))
    ends = math.floor((low - span) / unit) * unit, math.ceil((high + span) / unit) * unit
    rounded = [float(f"{end:.12g}") for end in ends]
    return (0.0 if low >= 0 else rounded[0], 0.0 if high <= 0 else rounded[1])


def identifiers(tables: Sequence[Table], names: Iterable[str]) -> list[str]:
    """Say of some columns which look like row numbers or identifiers, and why."""
    found = ((name, _why_identifier(_Seen.of(name, tables)) if name else "has no name") for name in names)
    return [f"column {name!r} {why}" for name, why in found if why]


def _why_identifier(seen: _Seen) -> str | None:
    """Say why a column looks like one of row numbers or identifiers; None: it does not."""
    for first in (0, 1):
        starts = [first + sum(map(len, seen.cells[:place])) for place in range(len(seen.cells))]
        for begins in (starts, [first] * len(starts)):
            rows = [
                [str(row) for row in range(start, start + len(part))]
                for start, part in zip(begins, seen.cells, strict=True)
            ]
            if seen.size > 2 and not seen.missing and seen.cells == rows:
                return f"counts the rows from {first}"
    if len(seen.distinct) == seen.size >= ENOUGH and "text" in seen.kinds():
        return f"{seen.size} different texts in as many rows, as identifiers have"
    if IDENTIFIER.search(seen.name) and len(seen.distinct) > CODES and not any("." in cell for cell in seen.distinct):
        return "is called like an identifier"
    return None


def ordered(names: Iterable[str]) -> list[str]:
    """Sort categories: as numbers if all are."""
    found = list(names)
    return sorted(found, key=float) if all(map(_is_float, found)) else sorted(found)
