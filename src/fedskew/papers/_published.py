"""The values that the papers print, as data of this project: `published.json`.

One entry for each table: what is measured and in which unit, the axes, and the rows: a label for each axis (null where
the axis does not apply), then mean and standard deviation as printed (null where none is).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ConfigError, nearest


@dataclass(frozen=True)
class Printed:
    """One printed value."""

    labels: Mapping[str, str]
    mean: float
    std: float | None


@dataclass(frozen=True)
class Table:
    """One printed table."""

    metric: str
    unit: str
    axes: tuple[str, ...]
    rows: tuple[Printed, ...]

    def find(self, labels: Mapping[str, str]) -> Printed | None:
        """What is printed for a row with these labels; axes that the table does not have don't matter."""
        own = {axis: labels[axis] for axis in self.axes if axis in labels}
        return next((row for row in self.rows if row.labels == own), None)


@cache
def _tables() -> dict[str, Any]:
    content = resources.files("fedskew.papers").joinpath("published.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(content)
    return tables


def published(name: str) -> Table:
    """A printed table by its name, such as "fedentopt-table1". Raises ConfigError for an unknown name."""
    tables = _tables()
    if name not in tables:
        raise ConfigError(f"published: no table is called {name!r}{nearest(name, tables)}")
    table = tables[name]
    axes = tuple(table["axes"])
    rows = []
    for *labels, mean, std in table["rows"]:
        known = {axis: label for axis, label in zip(axes, labels, strict=True) if label is not None}
        rows.append(Printed(known, mean, std))
    return Table(table["metric"], table["unit"], axes, tuple(rows))


def printed_counts() -> NDArray[np.int64]:
    """The label counts of FedVLS's table 7, `(clients, classes)`."""
    return np.array(_tables()["fedvls-table7"]["counts"], dtype=np.int64)
