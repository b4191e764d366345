"""Loads data sets by name."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedskew.data import _arrays
from fedskew.data._dataset import Dataset
from fedskew.data._digits import digit_domains, digits, svhn, syn_digits, synthetic, usps
from fedskew.data._folder import folder
from fedskew.data._huggingface import from_huggingface
from fedskew.data._image_sets import cinic10, iwildcam, pacs, tiny_imagenet
from fedskew.data._own import csv, npz
from fedskew.data._schema import Encoder
from fedskew.data._table import table_files
from fedskew.data.texts import ag_news
from fedskew.errors import ArgumentError, DataError, nearest
from fedskew.parameters import checked_options

Reader = Callable[..., Dataset]
"""A function with options as keywords; with `root` if it reads files, and `rng` if it draws random numbers."""

_READERS = (
    digits, _arrays.mnist, _arrays.fashion_mnist, _arrays.mnist_and_fashion, _arrays.fedvls_mnist,
    _arrays.emnist_balanced, _arrays.cifar10, _arrays.cifar100, cinic10, tiny_imagenet, usps, svhn, syn_digits,
    digit_domains, pacs, iwildcam, ag_news, synthetic, folder, npz, csv,
)  # fmt: skip
INDEX: dict[str, Reader] = {reader.__name__: reader for reader in _READERS} | {"huggingface": from_huggingface}
"""Readers by the names that configs use."""

OWN = ("folder", "npz", "csv", "huggingface")
"""Those of a user's own files."""


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    rng: np.random.Generator | None = None,
    encoder: Encoder | None = None,
    **options: Any,
) -> Dataset:
    """Read a data set by its name in `INDEX`.

    Args:
        root: The folder that holds `MNIST/raw/`, `cifar-10-batches-py/` and so on, or the user's own folder or file; by
            default, what the environment variable FEDSKEW_DATA names.
        encoder: How a federation's samples are made, of texts above all; None: as the training part says.
        rng: Used by readers that draw samples ("synthetic") or hold out a test part; the others ignore it.

    Raises:
        DataError: A file is missing, damaged or not what it should be.
        ArgumentError: No such data set or option, or a wrong value; the message names the argument.
    """
    if name not in INDEX:
        raise ArgumentError(f"name: no data set is called {name!r}{nearest(name, INDEX)}")
    reader = INDEX[name]
    options = checked_options(reader, options, f"data set {name!r}", ("root", "rng", "encoder"))
    accepted = inspect.signature(reader).parameters
    if "root" in accepted:
        options["root"] = _root(name, root)
    more = {"rng": rng, "encoder": encoder}
    return reader(**options, **{key: value for key, value in more.items() if key in accepted})


def _root(name: str, root: str | os.PathLike[str] | None) -> Path:
    given = root or os.environ.get("FEDSKEW_DATA")
    if not given:
        raise DataError(
            f"data set {name!r} is read from files: say where by root (--data-root on the command line), "
            "or by the environment variable FEDSKEW_DATA"
        )
    path = Path(given).expanduser()
    if not path.exists() and not (name == "csv" and table_files(path) != [path]):
        where = "root" if root else "FEDSKEW_DATA"
        raise DataError(f"{where}: {path} does not exist")
    return path
