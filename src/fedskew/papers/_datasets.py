"""The papers' data sets: which files they are, whether they are there, and how large they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedskew.errors import DataError

if TYPE_CHECKING:
    from fedskew.experiment import Config
    from fedskew.papers._recipe import Recipe, Row


@dataclass(frozen=True)
class Facts:
    """A data set as a recipe sees it.

    `places`: files under the root that must all be there ("*" stands for any ending). Shape and sizes, `train` and
    `test` in samples, serve the estimate of a recipe's cost.
    """

    title: str
    places: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    classes: int


_MNIST = ("MNIST/raw/train-images-idx3-ubyte*", "MNIST/raw/t10k-images-idx3-ubyte*")
_AG_NEWS = "ag_news_csv/test.csv"

DATASETS: dict[str, Facts] = {
    "mnist": Facts("MNIST", _MNIST, (1, 28, 28), 60_000, 10_000, 10),
    "fashion_mnist": Facts(
        "Fashion-MNIST",
        tuple(place.replace("MNIST", "FashionMNIST") for place in _MNIST),
        (1, 28, 28),
        60_000,
        10_000,
        10,
    ),
    "emnist_balanced": Facts(
        "EMNIST (balanced)",
        ("EMNIST/raw/emnist-balanced-train-images-idx3-ubyte*", "EMNIST/raw/emnist-balanced-test-images-idx3-ubyte*"),
        (1, 28, 28),
        112_800,
        18_800,
        47,
    ),
    "cifar10": Facts(
        "CIFAR-10",
        ("cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/test_batch"),
        (3, 32, 32),
        50_000,
        10_000,
        10,
    ),
    "cifar100": Facts(
        "CIFAR-100", ("cifar-100-python/train", "cifar-100-python/test"), (3, 32, 32), 50_000, 10_000, 100
    ),
    "cinic10": Facts("CINIC-10", ("cinic-10/train", "cinic-10/test"), (3, 32, 32), 90_000, 90_000, 10),
    "tiny_imagenet": Facts("Tiny ImageNet", ("tiny-imagenet-200/wnids.txt",), (3, 64, 64), 100_000, 10_000, 200),
    "digit_domains": Facts(
        "Digits (MNIST, USPS, SVHN, SYN)",
        (*_MNIST, "usps/zip.train.gz", "svhn/train_32x32.mat", "syn/synth_train_32x32.mat"),
        (3, 32, 32),
        619_948,
        47_592,
        10,
    ),
    "pacs": Facts(
        "PACS",
        tuple(f"PACS/{domain}" for domain in ("sketch", "cartoon", "art_painting", "photo")),
        (3, 224, 224),
        6_273,
        1_488,
        7,
    ),
    "iwildcam": Facts("iWildCam", ("iwildcam_v2.0/metadata.csv",), (3, 448, 448), 129_809, 42_791, 182),
    "ag_news": Facts("AG News", ("ag_news_csv/train.csv", _AG_NEWS), (200,), 120_000, 7_600, 4),
    "synthetic": Facts("synthetic (drawn)", (), (2,), 58, 2_000, 3),
}
"""By the name that a config gives them."""

_SUBSET = Facts("AG News subset", ("ag_news_csv/train-subset.csv", _AG_NEWS), (200,), 8_815, 7_600, 4)


def facts_of(table: Mapping[str, Any]) -> Facts:
    """Of the data set that the `[data]` of a config names."""
    return _SUBSET if table.get("subset") else DATASETS[table["name"]]


def absent(table: Mapping[str, Any], root: str | os.PathLike[str] | None = None) -> str | None:
    """The first file (or folder) that is not there, of the data set that the `[data]` of a config names; None where
    all are.

    `root`: as in `fedskew.data.load`, else FEDSKEW_DATA.
    """
    given = root or os.environ.get("FEDSKEW_DATA")
    folder = Path(given).expanduser() if given else None
    for place in facts_of(table).places:
        if folder is None or not any(folder.glob(place)):
            plain = place.removesuffix("*")
            return plain if folder is None else str(folder / plain)
    return None


def check_data(recipe: Recipe, planned: Sequence[tuple[Row, Config]]) -> None:
    """Raises DataError where files of a row are not there, naming the first, and the rows that could be run."""
    gone: dict[str, str] = {}
    others: dict[str, None] = {}
    for row, config in planned:
        if place := absent(row.tree["data"], config.data.root):
            gone.setdefault(facts_of(row.tree["data"]).title, place)
        elif label := row.labels.get("dataset"):
            others[label] = None
    if not gone:
        return
    title, place = next(iter(gone.items()))
    rest = f"; rows that can be run: --rows {','.join(others)!r}" if others else ""
    known = os.environ.get("FEDSKEW_DATA") or any(config.data.root for _, config in planned)
    root = "" if known else "; say where data sets are by --data-root or FEDSKEW_DATA"
    raise DataError(f"{recipe.name}: {title} is missing: {place} is not there{root}{rest}")
