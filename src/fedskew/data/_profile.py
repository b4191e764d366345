"""What samples look like, in numbers that add up over clients, and what has changed in later ones.

A number's cells are cut at mean + deviation * Phi^-1(k / 10), k = 1 to 9, which for normal numbers are its deciles; one
more is for missing values. A category is a cell. A column has changed where a chi-squared test of both rows of counts
says so; two numbers have changed together where Fisher's z test of their correlation does, each number replaced by the
middle of its cell in Phi's terms, so that far values don't decide. p values are Holm's, over all tests of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data._schema import TableSchema
from fedskew.data.texts import PADDING, UNKNOWN
from fedskew.errors import ArgumentError
from fedskew.tables import holm

FloatArray = NDArray[np.float64]
Columns = Mapping[str, NDArray[Any]]
"""Columns of samples by name: numbers, NaN where one is missing, or text, "" where it is missing or not known."""
Cells = Mapping[str, tuple[str, ...] | tuple[float, float]]
"""By column: names of categories, or mean and deviation of a number."""

CELLS = 10
_EDGES = np.array([NormalDist().inv_cdf(at / CELLS) for at in range(1, CELLS)])
_SCORES = np.array([*(NormalDist().inv_cdf((at + 0.5) / CELLS) for at in range(CELLS)), 0.0])  # missing: says nothing
_SPREAD = 1.25
"""By how much the variance is above that of normal numbers: with it one comparison in a hundred of halves of the breast
cancer table has p below .01 where nothing changed, without it one in 25 (`tests/data/test_profile.py`)."""

MOST_PAIRED = 60
"""Most columns of numbers whose correlations are kept."""


class Change(NamedTuple):
    """A test of later samples against a profile: of a column, or of two numbers together.

    Attributes:
        what: The column, or "one with another".
        p: Holm's p value over all tests of the comparison.
        before: In the profile: the mean, the share of the likeliest category that changed most, or the correlation.
        now: The same of the later samples.
        unit: What these two are: "mean", "missing", "share of NAME" or "correlation".
    """

    what: str
    p: float
    before: float
    now: float
    unit: str


@dataclass(frozen=True)
class Profile:
    """How many samples fall into each cell of each column, and how numbers go together.

    Attributes:
        cells: By column: names of categories, or mean and deviation of a number.
        counts: By column: samples by cell, the last for missing values and categories that are not known.
        numbers: The first `MOST_PAIRED` columns of numbers.
        products: Sums of products of their scores, `(numbers, numbers)`.
    """

    samples: int
    cells: Cells
    counts: Mapping[str, tuple[int, ...]]
    numbers: tuple[str, ...]
    products: tuple[tuple[float, ...], ...]

    @staticmethod
    def columns(inputs: Tensor, schema: TableSchema | None = None) -> dict[str, NDArray[Any]]:
        """Return what samples in their own units are compared by: a table's columns, or features by number; of images
        how bright and how varied each channel is; of token ids how many words there are, and how many are unknown."""
        if schema is not None:
            return _of_table(schema.restored(inputs).double().numpy(), schema)
        if not inputs.is_floating_point():
            words = (inputs != PADDING).sum(dim=1)
            unknown = (inputs == UNKNOWN).sum(dim=1) / words.clamp(min=1)
            return {"words": words.double().numpy(), "share of unknown words": unknown.double().numpy()}
        if inputs.dim() == 2:
            return {f"feature {at}": column for at, column in enumerate(inputs.double().numpy().T)}
        pixels = inputs.double().flatten(2)
        names = [""] if pixels.shape[1] == 1 else [f" of channel {at}" for at in range(pixels.shape[1])]
        found = {f"brightness{name}": pixels[:, at].mean(dim=1).numpy() for at, name in enumerate(names)}
        return found | {f"contrast{name}": pixels[:, at].std(dim=1).numpy() for at, name in enumerate(names)}

    @classmethod
    def of(cls, columns: Columns, cells: Cells | None = None) -> Profile:
        """Describe samples, in given cells or in those that they make.

        Raises ArgumentError where there is no sample or column, or a column of given cells is missing.
        """
        lengths = {len(values) for values in columns.values()}
        if len(lengths) != 1 or lengths == {0}:
            raise ArgumentError("columns: expected at least one, all of the same number of samples, not 0")
        cells = cells or {name: _cells_of(values) for name, values in columns.items()}
        if missing := sorted(cells.keys() - columns.keys()):
            raise ArgumentError(f"columns: {missing[0]} is missing")
        placed = {name: _placed(columns[name], own) for name, own in cells.items()}
        counts = {name: np.bincount(at, minlength=_size(cells[name]) + 1) for name, at in placed.items()}
        numbers = [name for name in cells if _is_number(cells[name])][:MOST_PAIRED]
        scores = np.array([_SCORES[placed[name]] for name in numbers]).reshape(len(numbers), -1)
        return cls(
            lengths.pop(),
            dict(cells),
            {name: tuple(row.tolist()) for name, row in counts.items()},
            tuple(numbers),
            tuple(map(tuple, (scores @ scores.T).tolist())),
        )

    @staticmethod
    def cells_of(schema: TableSchema, mean: Sequence[float], std: Sequence[float]) -> Cells:
        """Return the cells of a table's columns by means and deviations of its inputs."""
        named = [(name, schema.columns[name].categories) for name in schema.inputs]
        return {name: known or (float(mean[at]), float(std[at])) for at, (name, known) in enumerate(named)}

    @classmethod
    def size(cls, cells: Cells) -> int:
        """Return how many numbers `flat` returns of a profile in these cells."""
        numbers = min(sum(map(_is_number, cells.values())), MOST_PAIRED)
        return sum(_size(own) + 1 for own in cells.values()) + numbers * (numbers + 1) // 2

    def flat(self) -> FloatArray:
        """Return counts, and sums of products of each two numbers, in one vector, which adds up over clients."""
        products = np.array(self.products).reshape(len(self.numbers), -1)[np.triu_indices(len(self.numbers))]
        return np.concatenate([*(np.array(row, dtype=np.float64) for row in self.counts.values()), products])

    @classmethod
    def of_flat(cls, values: FloatArray, cells: Cells, rounding: float) -> Profile:
        """Read what `flat` returned, or sums of it; ArgumentError where these are of no samples in these cells."""
        ends = np.cumsum([_size(own) + 1 for own in cells.values()])
        *rows, rest = np.split(values, ends)
        samples, numbers = rows[0].sum(), tuple(name for name in cells if _is_number(cells[name]))[:MOST_PAIRED]
        if any((row < 0).any() or (row != np.rint(row)).any() or row.sum() != samples for row in rows):
            raise ArgumentError("columns are of other samples than each other, or of less than none")
        upper, half = np.zeros((len(numbers), len(numbers))), np.triu_indices(len(numbers))
        upper[half] = rest
        counts = dict(zip(cells, rows, strict=True))
        squares = np.array([counts[name] @ _SCORES**2 for name in numbers])
        most = np.sqrt(np.outer(squares, squares)) + rounding
        if (np.abs(np.diag(upper) - squares) > rounding).any() or (np.abs(upper) > most).any():
            raise ArgumentError("numbers that go together are not those in the cells")
        products = np.triu(upper, 1) + np.triu(upper).T
        found = {name: tuple(row.astype(int).tolist()) for name, row in counts.items()}
        return cls(int(samples), dict(cells), found, numbers, tuple(map(tuple, products.tolist())))

    def plain(self) -> dict[str, Any]:
        """Return the profile as plain values, as JSON has them."""
        return {name: getattr(self, name) for name in ("samples", "cells", "counts", "numbers", "products")}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Profile:
        """Read what `plain` returned."""
        cells, counts = ({name: tuple(row) for name, row in values[key].items()} for key in ("cells", "counts"))
        numbers, products = tuple(values["numbers"]), tuple(map(tuple, values["products"]))
        return cls(int(values["samples"]), cells, counts, numbers, products)

    def changes(self, columns: Columns) -> list[Change]:
        """Compare later samples with these, least p first; all tests are listed, those without a change too."""
        numbers = self.numbers
        later = Profile.of(columns, {name: self.cells[name] for name in [*numbers, *self.cells]})
        found = [self._column(later, name, columns[name]) for name in self.cells]
        for one, other in combinations(range(len(numbers)), 2):
            before, now = self._correlation(one, other), later._correlation(one, other)
            spread = np.sqrt(_SPREAD * sum(1 / max(profile.samples - 3, 1) for profile in (self, later)))
            p = math.erfc(abs(np.arctanh(before) - np.arctanh(now)) / spread / math.sqrt(2))
            found.append(Change(f"{numbers[one]} with {numbers[other]}", p, before, now, "correlation"))
        found.sort(key=lambda change: change.p)
        return [one._replace(p=p) for one, p in zip(found, holm([one.p for one in found]), strict=True)]

    def _column(self, later: Profile, name: str, values: NDArray[Any]) -> Change:
        from scipy.stats import chi2_contingency  # a site's process imports no SciPy

        table = np.array([self.counts[name], later.counts[name]], dtype=np.float64)
        table = table[:, table.sum(axis=0) > 0]
        p = float(chi2_contingency(table, correction=False).pvalue) if table.shape[1] > 1 else 1.0
        before, now = (np.array(one.counts[name]) / one.samples for one in (self, later))
        at, cells = int(np.abs(now - before).argmax()), self.cells[name]
        if _is_number(cells) and at < CELLS:
            return Change(name, p, float(cells[0]), float(np.nanmean(values)), "mean")
        unit = "missing" if _is_number(cells) else f"share of {[*cells, 'others'][at]}"
        return Change(name, p, float(before[at]), float(now[at]), unit)

    def _correlation(self, one: int, other: int) -> float:
        products = self.products
        scale = np.sqrt(products[one][one] * products[other][other])
        return float(np.clip(products[one][other] / scale, -0.999, 0.999)) if scale > 0 else 0.0


def _of_table(inputs: FloatArray, schema: TableSchema) -> dict[str, NDArray[Any]]:
    """Return a table's columns from its inputs: numbers with NaN, and the names of categories, "" of any other."""
    found: dict[str, NDArray[Any]] = {}
    for at, slot in enumerate(schema.slots):
        name = schema.inputs[slot.source]
        if slot.says == "value":
            found[name] = inputs[:, at]
        elif slot.says == "category":
            cells = found.setdefault(name, np.full(len(inputs), "", dtype=object))
            cells[inputs[:, at] == 1] = schema.columns[name].categories[slot.category]
    return found


def _is_number(cells: tuple[Any, ...]) -> bool:
    return len(cells) == 2 and not isinstance(cells[0], str)


def _size(cells: tuple[Any, ...]) -> int:
    return CELLS if _is_number(cells) else len(cells)


def _cells_of(values: NDArray[Any]) -> tuple[str, ...] | tuple[float, float]:
    if values.dtype.kind not in "fiub":
        return tuple(sorted({str(value) for value in values} - {""}))
    known = values[~np.isnan(values.astype(np.float64))]
    return (float(known.mean()), float(known.std()) or 1.0) if len(known) else (0.0, 1.0)


def _placed(values: NDArray[Any], cells: tuple[Any, ...]) -> NDArray[np.int64]:
    """Return the cell of each value; the last one for what is missing or not known."""
    if not _is_number(cells):
        number = {name: place for place, name in enumerate(cells)}
        return np.array([number.get(str(value), len(cells)) for value in values], dtype=np.int64)
    numbers = values.astype(np.float64)
    at = np.searchsorted(float(cells[0]) + float(cells[1]) * _EDGES, numbers, side="right")
    return np.where(np.isnan(numbers), CELLS, at)
