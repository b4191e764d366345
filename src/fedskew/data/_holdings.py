"""Who holds which labels, in data of a user's own that are not loaded: only names are read."""

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedskew.data._folder import is_image, tree
from fedskew.data._huggingface import class_names, labels_of, names_of
from fedskew.data._labels import Label, Place, by_number, of_columns, prepared
from fedskew.data._own import findings_in, labels_in, names_in, ordered, read_arrays
from fedskew.data._table import Table, is_saved, place_among, saved_table, table_files
from fedskew.data.texts import TEXT
from fedskew.errors import DataError, DataWarning, placed
from fedskew.names import CLASS_WORDS, CLIENT_WORDS, warn_of_look_alikes
from fedskew.sheets import columns_in, find_column

Counted = tuple[NDArray[np.float64], tuple[str, ...], tuple[str, ...], NDArray[np.float64] | None]
"""Label counts, `(clients, classes)`; the names of clients and classes, in order; and the samples of each client where
these may have several labels, or none."""


def holdings(path: Path, label: str | None = None, client: str | None = None, separator: str | None = None) -> Counted:
    """Count who holds which labels: a folder of images, an `.npz` file, tables or a folder of Hugging Face.

    A test part does not count. A DataWarning says where the data name no clients: all samples are those of one.

    Args:
        path: The folder or file, as the readers "folder", "npz", "csv" and "huggingface" take it. In a folder of images
            the first level names clients where it holds no images.
        label: Column of labels, in a table, or several of 0 and 1 apart by commas; None: the one that is called so.
        client: Column of clients, in a table; None: the one that is called so, if there is one.
        separator: Sign between the labels in a cell of a table, where a sample may have several.
    """
    if is_saved(path):
        return _of_huggingface(path, label, client, separator)
    if path.is_dir() and (any(map(Path.is_dir, path.iterdir())) or not table_files(path)):
        return _of_images(path)
    files = table_files(path)
    if not files or (files == [path] and not path.exists()):
        raise DataError(f"{path}: there is no such file or folder")
    return _of_arrays(path) if path.suffix.lower() == ".npz" else _of_tables(path, files, label, client, separator)


def _counted(
    path: Path,
    labels: Sequence[Label],
    clients: Sequence[str] | None,
    class_names: Sequence[str] = (),
    client_names: Collection[str] = (),
    place: Place = by_number,
) -> Counted:
    if not labels:
        raise DataError(f"{path}: holds no samples")
    ((_, found),) = prepared(path, [labels], numbered=class_names, places=[place])
    several = any(isinstance(label, tuple) for label in found)
    each = [label if isinstance(label, tuple) else (label,) for label in found]
    if clients is None:
        warnings.warn(
            f"{path}: names no clients, so that all samples are counted as those of one", DataWarning, stacklevel=2
        )
        clients = ["all"] * len(each)
    names = ordered({*clients, *client_names}), tuple(class_names) or ordered(chain(*each))
    for group, what in zip(names, ("clients", "classes"), strict=True):
        warn_of_look_alikes(group, what, path)
    table = np.zeros((len(names[0]), len(names[1])))
    places = [{name: place for place, name in enumerate(group)} for group in names]
    owners = [places[0][name] for name in clients]
    pairs = [(owner, places[1][name]) for owner, own in zip(owners, each, strict=True) for name in own]
    np.add.at(table, tuple(np.array(pairs, dtype=np.int64).reshape(-1, 2).T), 1)
    return table, *names, np.bincount(owners, minlength=len(table)).astype(np.float64) if several else None


def _of_images(path: Path) -> Counted:
    top = path / "train" if (path / "train").is_dir() else path
    folders = [folder for folder in top.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    files = (file for folder in folders for file in folder.iterdir())
    client_level = not any(is_image(file) or file.suffix.lower() == TEXT for file in files)
    found = tree(top, client_level, {})
    labels = [file.label for file in found.files]
    return _counted(path, labels, found.owners, ordered(found.classes), found.clients)


def _of_arrays(path: Path) -> Counted:
    arrays = read_arrays(path, ("y", "client", "classes"))
    if "y" not in arrays:
        raise DataError(f"{path}: has no array 'y' of labels")
    clients = names_in(path, "client", arrays["client"], len(arrays["y"])) if "client" in arrays else None
    numbered = findings_in(path, arrays) if arrays["y"].ndim == 2 else ()
    return _counted(path, labels_in(path, "y", arrays, len(arrays["y"])), clients, numbered)


def _of_tables(
    path: Path, files: Sequence[Path], label: str | None, client: str | None, separator: str | None
) -> Counted:
    """Count tables; of several each is a client's, called as the file, unless a column names clients."""
    labels, clients, numbered = list[Label](), list[str](), tuple[str, ...]()
    tables = [Table.read(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        named, owner = _columns(file, list(table.columns), label, client)
        if separator is not None and len(named) > 1:
            raise DataError(f"{file}: separator is for one column of labels, and these are {len(named)}; leave it out")
        numbered = named if len(named) > 1 else ()
        labels += of_columns(file, named, table.columns.__getitem__, separator, table.place)
        if owner is not None:
            clients += table.texts(owner, "client")
        elif len(files) > 1:
            clients += [file.stem] * len(table)
    return _counted(path, labels, clients or None, numbered, place=partial(place_among, tables))


def _columns(
    path: Path, names: Sequence[str], label: str | None, client: str | None
) -> tuple[tuple[str, ...], str | None]:
    """Return the columns of labels, and that of clients if there is one."""
    with placed(f"{path}: ", DataError):
        named = [None] if label is None else columns_in(label, names)
        places = [find_column(names, "label", CLASS_WORDS, one) for one in named]
        owner = find_column(names, "client", CLIENT_WORDS, client)
    found = tuple(names[place] for place in places if place is not None)
    if not found:
        raise DataError(f"{path}: no column of labels; say by --label which it is (it has: {', '.join(names)})")
    return found, None if owner is None else names[owner]


def _of_huggingface(path: Path, label: str | None, client: str | None, separator: str | None) -> Counted:
    table = saved_table(path)
    part = table["train"] if isinstance(table, dict) and "train" in table else table  # a DatasetDict
    named, owner = _columns(path, part.column_names, label, client)
    owners = None if owner is None else names_of(part, owner)
    numbered = named if len(named) > 1 else class_names(part, named[0])
    return _counted(path, labels_of(part, named, separator), owners, numbered)
