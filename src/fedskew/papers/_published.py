"""The values that the papers print: `published.json`.

One entry for each table: what is measured and in which unit, the axes, and the rows: a label for each axis (null where
the axis does not apply), then mean and standard deviation as printed (null where none is). What stands in the authors'
own runs, published beside the paper, names its source.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ConfigError, PartitionError, nearest


@dataclass(frozen=True)
class Printed:
    """One printed value: its label on each axis, mean, and standard deviation where one is printed."""

    labels: Mapping[str, str]
    mean: float
    std: float | None


@dataclass(frozen=True)
class PublishedTable:
    """One printed table; `source` says where the values stand: "as printed", or beside the paper."""

    metric: str
    source: str
    unit: str
    rows: tuple[Printed, ...]

    def find(self, labels: Mapping[str, str]) -> Printed | None:
        """Return what is printed for a row with these labels, whatever else they name; the row with the most counts."""
        found = [row for row in self.rows if row.labels.items() <= labels.items()]
        return max(found, key=lambda row: len(row.labels), default=None)


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return tables


def published(name: str) -> PublishedTable:
    """Return a printed table."""
    tables = {name: table for name, table in _tables().items() if "rows" in table}
    if name not in tables:
        raise ConfigError(f"published: no table is called {name!r}{nearest(name, tables)}")
    table = tables[name]
    rows = []
    for *labels, mean, std in table["rows"]:
        known = {axis: label for axis, label in zip(table["axes"], labels, strict=True) if label is not None}
        rows.append(Printed(known, mean, std))
    return PublishedTable(table["metric"], table.get("source", "as printed"), table["unit"], tuple(rows))


@dataclass(frozen=True)
class PrintedCounts:
    """The one partition that a paper prints in full: CIFAR-10 among ten clients, FedVLS's table 7.

    Each client has as many samples of each class as the table prints; which ones is drawn.
    """

    target_client: ClassVar[bool] = False

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[NDArray[np.int64]]:
        """Divide the samples among 10 clients; see `fedskew.partition.Rule`.

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
