"""What a table's columns hold, and the numbers that a network gets of them: a schema, made once and shared by sites.

    missing = ["", "na", "nan"]             cells that count as missing, in small letters; there is a default

    [columns]
    age = {kind = "number", unit = "years", range = [0, 120], missing = true}
    sex = {kind = "category", categories = ["f", "m"]}
    seen = {kind = "date"}
    diagnosis = {kind = "label"}            also "client" and "ignored"

A sample becomes its numbers (dates as days since 1970), in the schema's order, then a 1 or 0 for each number with
`missing = true`, whether it is missing, then 1 or 0 for each category, and for "another one, or missing". Numbers alone
are standardised, by mean and deviation of those that are there; a missing one then is 0, the mean.
"""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew.data._labels import Label, NoLabel, of_columns, whole
from fedskew.data._table import Table
from fedskew.errors import ArgumentError, DataWarning, nearest, placed
from fedskew.parameters import Finite, Switch, component
from fedskew.trees import on_one_line, read_tree

Kind = Literal["number", "category", "date", "label", "client", "ignored"]

MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none", "nat", "<na>", "?")
"""Cells that count as missing, in small letters."""

_WHOLE = re.compile(r"(?<=\d)\.0+$")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_NO_LABELS = 'the schema names no column of labels; give one kind = "label", or set data.label'
_DATES = (-25567.0, 47482.0)
"""1900 to 2100, as days since 1970."""

TYPED = 10
"""So many cells of a column of which none is a known category are of another kind."""


class Encoder(Protocol):
    """Turns samples as they are in files into a network's inputs, in their own units; it travels with the model."""

    @property
    def kind(self) -> str:
        """Its name in `ENCODERS`."""

    def plain(self) -> dict[str, Any]:
        """Return it in plain values, with its `kind`, from which `encoder_of` makes it again."""

    def read(self, path: Path, skip_broken: bool = False) -> tuple[list[str], Tensor]:
        """Return names of a file's samples, and their inputs before they are normalised, `(samples, *in_shape)`.

        `skip_broken` leaves out files of a folder that can't be read.
        """

    def encode(self, rows: Any) -> Tensor:
        """Return the inputs of samples that are objects of Python, before they are normalised."""

    def labels(self, path: Path) -> list[str]:
        """Return the label of each of a file's samples, in the order of `read`."""


@component
class Column:
    """What a column holds: the categories in order (of labels: the classes), whether cells may be missing, the least
    and greatest number, and a unit, for readers only."""

    kind: Kind
    categories: tuple[str, ...] = ()
    missing: Switch = False
    range: tuple[Finite, Finite] | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        if self.kind == "category" and not self.categories:
            raise ArgumentError("categories: missing; list those of the column")
        if len(set(self.categories)) < len(self.categories):
            raise ArgumentError("categories: names one twice")
        if self.categories and self.kind not in ("category", "label"):
            raise ArgumentError(f"categories: are of a category or of labels, and the kind is {self.kind!r}")
        if self.range is not None and (self.kind != "number" or self.range[0] >= self.range[1]):
            raise ArgumentError(f"range: is [least, greatest] of a number, not {list(self.range)} of a {self.kind}")


class _Slot(NamedTuple):
    """One input: the place of its column among those that are read, what it says of it, and of which category."""

    source: int
    says: Literal["value", "missing", "category", "other"]
    category: int
    categories: int
    name: str


@component
class TableSchema:
    """What a table's columns hold, by name in the order of the inputs, and which cells count as missing (in small
    letters); see the text above. It is an `Encoder`."""

    columns: dict[str, Column]
    missing: tuple[str, ...] = MISSING

    def __post_init__(self) -> None:
        if len(named := [name for name, column in self.columns.items() if column.kind == "client"]) > 1:
            raise ArgumentError(f"columns.{named[1]}.kind: {named[0]!r} is the column of clients already")
        described = [name for name in self.labelled if self.columns[name].categories]
        if described and len(self.labelled) > 1:
            raise ArgumentError(f"columns.{described[0]}.categories: of several columns of labels each holds 0 and 1")
        if not self.inputs:
            raise ArgumentError("columns: none is a number, category or date, so nothing is left to learn from")

    @property
    def kind(self) -> str:
        """As every `Encoder` has it."""
        return "table"

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The columns that a network gets something of: numbers and dates, then categories."""
        return tuple(
            name
            for kinds in (("number", "date"), ("category",))
            for name, column in self.columns.items()
            if column.kind in kinds
        )

    @cached_property
    def numbers(self) -> int:
        """How many of these are numbers or dates; so many inputs, the first ones, are standardised."""
        return sum(self.columns[name].kind != "category" for name in self.inputs)

    @cached_property
    def slots(self) -> tuple[_Slot, ...]:
        """What each input says."""
        values, marks, hot = list[_Slot](), list[_Slot](), list[_Slot]()
        for place, name in enumerate(self.inputs):
            column = self.columns[name]
            if place >= self.numbers:
                known = column.categories
                hot += [_Slot(place, "category", at, len(known), f"{name} = {one}") for at, one in enumerate(known)]
                hot.append(_Slot(place, "other", -1, len(known), f"{name} = another"))
                continue
            values.append(_Slot(place, "value", -1, 0, name))
            if column.missing:
                marks.append(_Slot(place, "missing", -1, 0, f"{name} is missing"))
        return (*values, *marks, *hot)

    @property
    def without_range(self) -> tuple[str, ...]:
        """The numbers whose range the schema does not give."""
        columns = ((name, self.columns[name]) for name in self.inputs)
        return tuple(name for name, column in columns if column.kind == "number" and not column.range)

    def middles(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the middle and the half width of the range of each number; of dates from 1900 to 2100."""
        ranges = [self.columns[name].range or _DATES for name in self.inputs[: self.numbers]]
        low, high = np.array(ranges, dtype=np.float64).reshape(-1, 2).T
        return (low + high) / 2, (high - low) / 2

    @property
    def labelled(self) -> tuple[str, ...]:
        """The columns of labels: several hold 0 and 1 each, where a sample may have several labels, or none."""
        return tuple(name for name, column in self.columns.items() if column.kind == "label")

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, where the schema names them."""
        return self.columns[self.labelled[0]].categories if len(self.labelled) == 1 else self.labelled

    def plain(self) -> dict[str, Any]:
        """See `Encoder.plain`."""
        columns = {name: _plain(column) for name, column in self.columns.items()}
        own = {} if self.missing == MISSING else {"missing": list(self.missing)}
        return {"kind": self.kind, **own, "columns": columns}

    def toml(self) -> str:
        """Return the schema as TOML, one line a column, as `read_toml` reads it."""
        values = self.plain()
        lines = [f"missing = {on_one_line(values['missing'])}", ""] if "missing" in values else []
        columns = (
            f"{name if _BARE.fullmatch(name) else on_one_line(name)} = {on_one_line(column)}"
            for name, column in values["columns"].items()
        )
        return "\n".join([*lines, "[columns]", *columns, ""])

    @staticmethod
    def of_plain(values: Mapping[str, Any]) -> "TableSchema":
        """Make a schema of what `plain` returned, or of a TOML file's tree; ArgumentError where it is none."""
        own, columns = {key: value for key, value in values.items() if (key, value) != ("kind", "table")}, {}
        for name, column in dict(own.get("columns", {})).items():
            with placed(f"columns.{name}.", ArgumentError, of=(ArgumentError, TypeError)):
                columns[name] = Column(**column)
        return TableSchema(**own | {"columns": columns})

    @staticmethod
    def read_toml(path: Path) -> "TableSchema":
        """Read a schema from a TOML file; ConfigError names file and key."""
        tree, _, _ = read_tree(path, "schema", None, False)
        with placed(f"{path}: ", of=(ArgumentError, TypeError)):
            return TableSchema.of_plain(tree)

    def read(self, path: Path, skip_broken: bool = False) -> tuple[list[str], Tensor]:
        """See `Encoder.read`."""
        table = Table.read(path)
        return table.names(), self.encoded(table)

    def labels(self, path: Path) -> list[str]:
        """See `Encoder.labels`."""
        table = Table.read(path)
        found = self.labels_in(table)
        for row, label in enumerate(found):
            if isinstance(label, NoLabel) or not label:
                table.fail(f"{label!r} is no class", row, self.labelled[0])
        return list(map(str, found))

    def encode(self, rows: Any) -> Tensor:
        """See `Encoder.encode`; rows are a data frame, or a list of one dict a row."""
        return self.encoded(Table.of(rows))

    def encoded(self, table: Table) -> Tensor:
        """Return the inputs of a table's samples in their own units, `(samples, inputs)` float64, NaN where missing."""
        inputs: Tensor = _Inputs(self)(torch.from_numpy(self.values(table)))
        return inputs

    def restored(self, inputs: Tensor) -> Tensor:
        """Return inputs in their own units with NaN, and not the mean, where a number is missing."""
        restored = inputs.clone()
        for at, slot in enumerate(self.slots):
            if slot.says == "missing":
                restored[inputs[:, at] == 1, slot.source] = torch.nan
        return restored

    def values(self, table: Table) -> NDArray[np.float64]:
        """Return one number for each sample and column of `inputs`: of a category its place; NaN where missing.

        DataError names a column that is missing, unknown or holds something else, and where.
        """
        self.check(table)
        sign = table.sign([name for name in self.inputs if self.columns[name].kind == "number"])
        parts = []
        for name in self.inputs:
            column = self.columns[name]
            absent = table.absent(name, self.missing, column.categories)
            if column.kind != "category" and not column.missing and absent.any():
                row, cell = int(absent.argmax()), table.columns[name][int(absent.argmax())]
                what = f"{cell!r} counts as missing" if cell else "empty"
                advice = "with missing = true in the schema the mean takes its place, and is marked"
                table.fail(f"{what}, and no cell of this column may be missing; {advice}", row, name)
            if column.kind == "category":
                parts.append(self._places(table, name, absent))
            elif column.kind == "date":
                parts.append(table.days(name, absent))
            else:
                parts.append(table.numbers(name, absent, sign, "not a number"))
                _check_range(table, name, column, parts[-1])
        return np.stack(parts, axis=1)

    def module(self) -> nn.Module:
        """Return what makes inputs of `values`, as a network that can be exported."""
        return _Inputs(self)

    def values_in_words(self) -> str:
        """Say which numbers `values` returns for a sample, for programs that have to give them."""
        columns = [(name, self.columns[name].kind, self.columns[name].categories) for name in self.inputs]
        said = [
            f"{name} (days since 1970-01-01)"
            if kind == "date"
            else f"{name} ({', '.join(f'{place}: {one}' for place, one in enumerate(known))}; -1: another)"
            if kind == "category"
            else name
            for name, kind, known in columns
        ]
        return f"float32, one number for each column in this order, NaN where it is missing: {', '.join(said)}"

    def check(self, table: Table) -> None:
        """Raise DataError unless a table has all columns that are read, and none that the schema does not name."""
        found, known = list(table.columns), list(self.columns)
        lacking = [name for name in self.inputs if name not in table.columns]
        unknown = [name for name in found if name not in self.columns]
        if lacking:
            more = f"; neither {listed(lacking[1:])}" if lacking[1:] else ""
            table.fail(f"no column {lacking[0]!r}, which the schema has{_close(lacking[0], unknown)}{more}")
        if unknown:
            more = f"; nor {listed(unknown[1:])}" if unknown[1:] else ""
            advice = 'leave it out, or give it a line there, such as kind = "ignored"'
            table.fail(f"the schema has no column {unknown[0]!r}{_close(unknown[0], known)}{more}; {advice}")

    def labels_in(self, table: Table, separator: str | None = None) -> Sequence[Label]:
        """Return the labels of each sample (see `of_columns`)."""
        for name in self.labelled or (None,):
            if name not in table.columns:
                table.fail(f"no column {name!r} of labels" if name else _NO_LABELS)

        def cells(name: str) -> Sequence[str]:
            known = self.columns[name].categories
            if not known:
                return table.columns[name]
            gone = table.absent(name, self.missing, known)
            found = [cell if cell in known else whole(cell) for cell in table.columns[name]]
            for row, cell in enumerate(found):
                if not gone[row] and separator is None and cell not in known:
                    table.fail(f"{cell!r} is none of the schema's classes{nearest(cell, known)}", row, name)
            return [NoLabel(cell) if absent else cell for cell, absent in zip(found, gone, strict=True)]

        return of_columns(table.where, self.labelled, cells, separator, table.place)

    def clients_in(self, table: Table) -> Sequence[str] | None:
        """Return the client of each sample; None where the table has no clients."""
        name = next((name for name, column in self.columns.items() if column.kind == "client"), None)
        return None if name is None or name not in table.columns else table.texts(name, "client")

    def _places(self, table: Table, name: str, absent: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the place of each cell's category: -1 of another one, NaN where it is missing."""
        known = {category: float(place) for place, category in enumerate(self.columns[name].categories)}
        cells = _as_known(table.columns[name], known)
        places = np.array([known.get(cell, -1.0) for cell in cells])
        others = dict.fromkeys(
            cell for cell, place, gone in zip(cells, places, absent, strict=True) if place < 0 and not gone
        )
        if others:
            number, there = int(((places < 0) & ~absent).sum()), int((~absent).sum())
            said = f"{listed(list(others))}; the schema has {listed(list(known))}"
            if number == there >= TYPED:
                table.fail(f"not one of its {there} cells is of a category of the schema: {said}", None, name)
            counted = f"{number} cell is" if number == 1 else f"{number} cells are"
            warnings.warn(
                f"{table.where}, column {name!r}: {counted} of no category of the schema, and taken as another one: "
                f"{said}",
                DataWarning,
                stacklevel=2,
            )
        places[absent] = np.nan
        return places


class _Inputs(nn.Module):
    """What `TableSchema.values` returns, to inputs; TorchScript compiles `forward`."""

    def __init__(self, schema: TableSchema) -> None:
        super().__init__()
        source, says, category, categories, _ = zip(*schema.slots, strict=True)
        self.register_buffer("source", torch.tensor(source))
        self.register_buffer("category", torch.tensor(category, dtype=torch.float64))
        self.register_buffer("categories", torch.tensor(categories, dtype=torch.float64))
        for what in ("value", "missing", "category", "other"):
            self.register_buffer(f"is_{what}", torch.tensor([one == what for one in says]))

    def forward(self, values: Tensor) -> Tensor:
        cells = values.double().index_select(1, self.source)  # type: ignore[arg-type]
        known = (cells >= 0) & (cells < self.categories)  # type: ignore[operator]
        marks = (self.is_missing & cells.isnan()) | (self.is_other & ~known)  # type: ignore[operator]
        marks = marks | (self.is_category & (cells == self.category))  # type: ignore[operator]
        return torch.where(self.is_value, cells, marks.double())  # type: ignore[arg-type]


def _as_known(cells: Sequence[str], known: Collection[str]) -> list[str]:
    """Return cells with 1.0 as 1 where that is known, as programs write whole numbers once one is missing."""
    same = {cell: whole for cell in set(cells) - set(known) if (whole := _WHOLE.sub("", cell)) in known}
    return [same.get(cell, cell) for cell in cells]


def _plain(column: Column) -> dict[str, Any]:
    said: dict[str, Any] = {"kind": column.kind, "categories": list(column.categories), "missing": column.missing}
    said |= {"range": None if column.range is None else list(column.range), "unit": column.unit}
    return {key: value for key, value in said.items() if value not in ([], False, None, "")}


def _check_range(table: Table, name: str, column: Column, values: NDArray[np.float64]) -> None:
    low, high = column.range or (-np.inf, np.inf)
    outside = (values < low) | (values > high)
    if outside.any():
        row, unit = int(outside.argmax()), f" {column.unit}" if column.unit else ""
        said = f"{values[row]:.10g} is outside the schema's range, {low:g} to {high:g}{unit}"
        table.fail(f"{said} ({int(outside.sum())} of the column are); another unit, or a mistake?", row, name)


def _close(name: str, names: Sequence[str]) -> str:
    said = nearest(name, names) if names else ""
    return "" if said.startswith(" (known") else said


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(map(repr, names[:6])) + (", ..." if len(names) > 6 else "")


ENCODERS: dict[str, Callable[..., Encoder]] = {"table": lambda **values: TableSchema.of_plain(values)}
"""By kind: what makes an encoder anew from the values that its `plain` gave, each by its name."""


def encoder_of(plain: Mapping[str, Any]) -> Encoder:
    """Make an encoder of what its `plain` returned; ArgumentError where that can't be one."""
    kind = plain.get("kind", "table")
    if kind not in ENCODERS:
        raise ArgumentError(f"encoder.kind: there is none {kind!r}{nearest(str(kind), ENCODERS)}")
    return ENCODERS[kind](**{name: value for name, value in plain.items() if name != "kind"})
