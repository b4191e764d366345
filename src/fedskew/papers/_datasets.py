"""The papers' data sets: which files they are, and whether they are there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedskew.errors import DataError

if TYPE_CHECKING:
    from fedskew.experiment import Config
    from fedskew.papers._recipe import Recipe, Row


@dataclass(frozen=True)
class Facts:
    """A data set as a recipe sees it: what it is called, its files under the root, and its size."""

    title: str
    places: tuple[str, ...]  # under the root; of each, at least one that matches must be there
    shape: tuple[int, ...]
    train: int
    test: int
    classes: int


DATASETS: dict[str, Facts] = {
    "mnist": Facts("MNIST", ("MNIST/raw/train-images-idx3-ubyte*",), (1, 28, 28), 60_000, 10_000, 10),
    "fashion_mnist": Facts(
        "Fashion-MNIST", ("FashionMNIST/raw/train-images-idx3-ubyte*",), (1, 28, 28), 60_000, 10_000, 10
    ),
    "cifar10": Facts("CIFAR-10", ("cifar-10-batches-py/data_batch_1",), (3, 32, 32), 50_000, 10_000, 10),
    "cifar100": Facts("CIFAR-100", ("cifar-100-python/train",), (3, 32, 32), 50_000, 10_000, 100),
    "synthetic": Facts("synthetic", (), (2,), 58, 2_000, 3),
    "ag_news": Facts("AG News", ("ag_news_csv/train*.csv",), (200,), 120_000, 7_600, 4),
}
"""By the name that a config gives them. Shapes and sizes are for the estimate of a recipe's cost."""


def absent(name: str, root: str | os.PathLike[str] | None = None) -> str | None:
    """The file (or folder) of a data set that is not there, as `root`/...; None where all are.

    `root`: as in `fedskew.data.load`, else FEDSKEW_DATA.
    """
    facts = DATASETS.get(name)
    if facts is None or not facts.places:
        return None
    given = root or os.environ.get("FEDSKEW_DATA")
    folder = Path(given).expanduser() if given else None
    for place in facts.places:
        if folder is None or not any(folder.glob(place)):
            return place.rstrip("*") if folder is None else str(folder / place.rstrip("*"))
    return None


def missing_data(recipe: Recipe, planned: Sequence[tuple[Row, Config]]) -> None:
    """Raises DataError where files of a row are not there, naming the first, and the rows that could be run."""
    gone = {row.data: found for row, config in planned if (found := absent(row.data, config.data.root)) is not None}
    if not gone:
        return
    name, place = next(iter(gone.items()))
    title = DATASETS[name].title
    labels = [row.labels.get("dataset", row.data) for row, _ in planned if row.data not in gone]
    others = ",".join(dict.fromkeys(labels))
    rest = f"; rows that can be run: --rows {others!r}" if others else ""
    root = (
        ""
        if any(config.data.root for _, config in planned) or os.environ.get("FEDSKEW_DATA")
        else ("; say where data sets are by --data-root or FEDSKEW_DATA")
    )
    raise DataError(f"{recipe.name}: {title} is missing: {place} is not there{root}{rest}")
