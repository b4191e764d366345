"""Who holds which labels, in data of a user's own that are not loaded: only names are read."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedskew.data._folder import is_image, tree
from fedskew.data._huggingface import names_of
from fedskew.data._labels import Label, prepared
from fedskew.data._own import labels_in, names_in, ordered, read_arrays
from fedskew.data._table import is_saved, saved_table
from fedskew.data._text import TEXT
from fedskew.errors import ArgumentError, DataError, DataWarning
from fedskew.names import CLASS_WORDS, CLIENT_WORDS, warn_of_look_alikes
from fedskew.sheets import Sheet, find_column

Counted = tuple[NDArray[np.float64], tuple[str, ...], tuple[str, ...]]
"""Label counts, `(clients, classes)`, and the names of clients and classes, in order."""


def holdings(path: Path, label: str | None = None, client: str | None = None) -> Counted:
    """Count who holds which labels: a folder of images, an `.npz` file, a CSV file or a folder of Hugging Face.

    A test part does not count. A DataWarning says where the data name no clients: all samples are those of one.

    Args:
        path: The folder or file, as the readers "folder", "npz", "csv" and "huggingface" take it. In a folder of images
            the first level names clients where it holds no images.
        label: Column of labels, in a table; None: the one that is called so.
        client: Column of clients, in a table; None: the one that is called so, if there is one.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return _of_huggingface(path, label, client) if is_saved(path) else _of_images(path)
    return _of_arrays(path) if path.suffix.lower() == ".npz" else _of_table(path, label, client)


def _counted(
    path: Path,
    labels: Sequence[Label],
    clients: Sequence[str] | None,
    class_names: Sequence[str] = (),
    client_names: Collection[str] = (),
) -> Counted:
    if not labels:
        raise DataError(f"{path}: holds no samples")
    ((_, found),) = prepared(path, [labels], numbered=class_names)
    each = [label for label in found if isinstance(label, str)]
    if len(each) < len(found):
        raise DataError(f"{path}: a sample has several labels; count them by a config: fedskew counts my.toml")
    if clients is None:
        warnings.warn(
            f"{path}: names no clients, so that all samples are counted as those of one", DataWarning, stacklevel=2
        )
        clients = ["all"] * len(each)
    names = ordered({*clients, *client_names}), tuple(class_names) or ordered(each)
    for group, what in zip(names, ("clients", "classes"), strict=True):
        warn_of_look_alikes(group, what, path)
    table = np.zeros((len(names[0]), len(names[1])))
    places = [{name: place for place, name in enumerate(group)} for group in names]
    np.add.at(table, ([places[0][name] for name in clients], [places[1][name] for name in each]), 1)
    return table, *names


def _of_images(path: Path) -> Counted:
    top = path / "train" if (path / "train").is_dir() else path
    folders = [folder for folder in top.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    files = (file for folder in folders for file in folder.iterdir())
    client_level = not any(is_image(file) or file.suffix.lower() == TEXT for file in files)
    found = tree(top, client_level, {})
    labels = [file.label for file in found.files]
    return _counted(path, labels, found.owners, ordered(found.classes), found.clients)


def _of_arrays(path: Path) -> Counted:
    arrays = read_arrays(path, ("y", "client"))
    if "y" not in arrays:
        raise DataError(f"{path}: has no array 'y' of labels")
    clients = names_in(path, "client", arrays["client"], len(arrays["y"])) if "client" in arrays else None
    return _counted(path, labels_in(path, "y", arrays, len(arrays["y"])), clients)


def _of_table(path: Path, label: str | None, client: str | None) -> Counted:
    sheet = Sheet(path, "a header line, then one sample a line", error=DataError)
    place, owner = sheet.column("label", CLASS_WORDS, label), sheet.column("client", CLIENT_WORDS, client)
    if place is None:
        listed = ", ".join(sheet.header)
        sheet.fail(sheet.line, f"no column of labels; say by --label which it is (it has: {listed})")
    return _counted(path, sheet.texts(place, "class"), None if owner is None else sheet.texts(owner, "client"))


def _of_huggingface(path: Path, label: str | None, client: str | None) -> Counted:
    table = saved_table(path)
    part = table["train"] if isinstance(table, dict) and "train" in table else table  # a DatasetDict
    try:
        place = find_column(part.column_names, "label", CLASS_WORDS, label)
        owner = find_column(part.column_names, "client", CLIENT_WORDS, client)
    except ArgumentError as error:
        raise DataError(f"{path}: {error}") from None
    if place is None:
        raise DataError(f"{path}: no column of labels; say by --label which it is")
    label = part.column_names[place]
    owners = None if owner is None else names_of(part, part.column_names[owner])
    return _counted(path, names_of(part, label), owners, list(getattr(part.features[label], "names", None) or []))
