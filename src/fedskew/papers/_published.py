"""The values that the papers print: `published.json`.

One entry for each table: what is measured and in which unit, the axes, and the rows: a label for each axis (null where
the axis does not apply), then mean and standard deviation as printed (null where none is). What stands in the authors'
own runs instead, published beside the paper, names its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ConfigError, PartitionError, nearest


@dataclass(frozen=True)
class Printed:
    """One printed value.

    Attributes:
        labels: Its label on each axis of the table.
        mean: The value.
        std: Its standard deviation, None where none is printed.
    """

    labels: Mapping[str, str]
    mean: float
    std: float | None


@dataclass(frozen=True)
class PublishedTable:
    """One printed table.

    Attributes:
        metric: What is measured.
        source: Where the values stand: "as printed", or in what the authors published beside the paper.
        unit: The unit of the values.
        axes: What the rows differ in.
        rows: The values.
    """

    metric: str
    source: str
    unit: str
    axes: tuple[str, ...]
    rows: tuple[Printed, ...]

    def find(self, labels: Mapping[str, str]) -> Printed | None:
        """Return what is printed for a row with these labels.

        Axes that the table, or one of its rows, does not have are ignored; the row with the most labels counts.

        Args:
            labels: The row's label on each axis.
        """
        found = [row for row in self.rows if row.labels.items() <= labels.items()]
        return max(found, key=lambda row: len(row.labels), default=None)


@cache
def _tables() -> dict[str, Any]:
    content = resources.files("fedskew.papers").joinpath("published.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(content)
    return tables


def published(name: str) -> PublishedTable:
    """Return a printed table.

    Args:
        name: Its name, such as "fedentopt-table1"; see `published_names`.

    Raises:
        ConfigError: No table has this name.
    """
    names = published_names()
    if name not in names:
        raise ConfigError(f"published: no table is called {name!r}{nearest(name, names)}")
    table = _tables()[name]
    axes = tuple(table["axes"])
    rows = []
    for *labels, mean, std in table["rows"]:
        known = {axis: label for axis, label in zip(axes, labels, strict=True) if label is not None}
        rows.append(Printed(known, mean, std))
    return PublishedTable(table["metric"], table.get("source", "as printed"), table["unit"], axes, tuple(rows))


def published_names() -> tuple[str, ...]:
    """Return the names of all tables with printed values."""
    return tuple(name for name, table in _tables().items() if "rows" in table)


@dataclass(frozen=True)
class PrintedCounts:
    """The one partition that a paper prints in full: CIFAR-10 among ten clients, FedVLS's table 7.

    Each client has as many samples of each class as the table prints; which ones is drawn.
    """

    target_client: ClassVar[bool] = False

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[NDArray[np.int64]]:
        """Divide the samples; see `fedskew.partition.Rule`.

        Args:
            labels: Label of each sample.
            clients: Number of clients: 10.
            rng: Draws which samples each client gets.
            num_classes: Number of classes: 10.

        Raises:
            PartitionError: The table does not fit these samples or clients.
        """
        counts, labels = np.array(_tables()["fedvls-table7"]["counts"], dtype=np.int64), np.asarray(labels)
        held = np.bincount(labels, minlength=num_classes or 0)
        if clients != len(counts) or len(held) != counts.shape[1] or (held < counts.sum(axis=0)).any():
            raise PartitionError(
                f"the printed table is for {len(counts)} clients and {counts.shape[1]} classes of "
                f"{counts.sum(axis=0).max()} samples each, as CIFAR-10 has"
            )
        shares: list[list[NDArray[np.int64]]] = [[] for _ in counts]
        for label in range(counts.shape[1]):
            rows = rng.permutation(np.flatnonzero(labels == label))
            for client, part in enumerate(np.split(rows, np.cumsum(counts[:, label]))[:-1]):
                shares[client].append(part)
        return [np.sort(np.concatenate(parts)) for parts in shares]
