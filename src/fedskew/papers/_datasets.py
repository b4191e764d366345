"""The papers' data sets: their files, whether these are present, and their sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DatasetFacts:
    """The facts about a data set that a recipe needs.

    Attributes:
        title: Name as people write it.
        places: Files under the root that must all be present; "*" stands for any ending.
        shape: Shape of one sample, for the estimate of a recipe's cost.
        train: Number of training samples, for the same.
        test: Number of test samples, for the same.
        classes: Number of classes.
        tokens: Whether samples are texts, as token ids.
    """

    title: str
    places: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    tokens: bool = False


_MNIST = ("MNIST/raw/train-images-idx3-ubyte*", "MNIST/raw/t10k-images-idx3-ubyte*")
_AG_NEWS = "ag_news_csv/test.csv"

DATASETS: dict[str, DatasetFacts] = {
    "mnist": DatasetFacts("MNIST", _MNIST, (1, 28, 28), 60_000, 10_000, 10),
    "fashion_mnist": DatasetFacts(
        "Fashion-MNIST",
        tuple(place.replace("MNIST", "FashionMNIST") for place in _MNIST),
        (1, 28, 28),
        60_000,
        10_000,
        10,
    ),
    "mnist_and_fashion": DatasetFacts(
        "MNIST and Fashion-MNIST",
        (*_MNIST, *(place.replace("MNIST", "FashionMNIST") for place in _MNIST)),
        (1, 28, 28),
        120_000,
        20_000,
        20,
    ),
    "fedvls_mnist": DatasetFacts("MNIST as FedVLS's code divides it", _MNIST, (1, 28, 28), 52_500, 52_500, 10),
    "emnist_balanced": DatasetFacts(
        "EMNIST (balanced)",
        ("EMNIST/raw/emnist-balanced-train-images-idx3-ubyte*", "EMNIST/raw/emnist-balanced-test-images-idx3-ubyte*"),
        (1, 28, 28),
        112_800,
        18_800,
        47,
    ),
    "cifar10": DatasetFacts(
        "CIFAR-10",
        ("cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/test_batch"),
        (3, 32, 32),
        50_000,
        10_000,
        10,
    ),
    "cifar100": DatasetFacts(
        "CIFAR-100", ("cifar-100-python/train", "cifar-100-python/test"), (3, 32, 32), 50_000, 10_000, 100
    ),
    "cinic10": DatasetFacts("CINIC-10", ("cinic-10/train", "cinic-10/test"), (3, 32, 32), 90_000, 90_000, 10),
    "tiny_imagenet": DatasetFacts("Tiny ImageNet", ("tiny-imagenet-200/wnids.txt",), (3, 64, 64), 100_000, 10_000, 200),
    "digit_domains": DatasetFacts(
        "Digits (MNIST, USPS, SVHN, SYN)",
        (*_MNIST, "usps/zip.train.gz", "svhn/train_32x32.mat", "syn/synth_train_32x32.mat"),
        (3, 32, 32),
        619_948,
        47_592,
        10,
    ),
    "pacs": DatasetFacts(
        "PACS",
        tuple(f"PACS/{domain}" for domain in ("sketch", "cartoon", "art_painting", "photo")),
        (3, 224, 224),
        6_273,
        1_488,
        7,
    ),
    "iwildcam": DatasetFacts("iWildCam", ("iwildcam_v2.0/metadata.csv",), (3, 448, 448), 129_809, 42_791, 182),
    "ag_news": DatasetFacts("AG News", ("ag_news_csv/train.csv", _AG_NEWS), (200,), 120_000, 7_600, 4, tokens=True),
    "digits": DatasetFacts("digits", (), (1, 8, 8), 1_352, 445, 10),
    "synthetic": DatasetFacts("synthetic (drawn)", (), (2,), 58, 2_000, 3),
}
"""The data sets by the name that a config gives them."""

_SUBSET = DatasetFacts(
    "AG News subset", ("ag_news_csv/train-subset.csv", _AG_NEWS), (200,), 8_815, 7_600, 4, tokens=True
)


def facts_of(table: Mapping[str, Any]) -> DatasetFacts:
    """Return the facts of the data set that the `[data]` table of a config names."""
    return _SUBSET if table.get("subset") else DATASETS[table["name"]]


def absent(table: Mapping[str, Any], root: str | os.PathLike[str] | None = None) -> str | None:
    """Return the first file or folder of a data set that is missing; None where all are present.

    Args:
        table: The `[data]` table of a config.
        root: Folder of the data sets, see `fedskew.data.load`; by default the environment variable FEDSKEW_DATA.
    """
    given = root or os.environ.get("FEDSKEW_DATA")
    folder = Path(given).expanduser() if given else None
    for place in facts_of(table).places:
        if folder is None or not any(folder.glob(place)):
            plain = place.removesuffix("*")
            return plain if folder is None else str(folder / plain)
    return None
