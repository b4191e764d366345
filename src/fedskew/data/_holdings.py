"""Who holds which labels, in data of a user's own that are not loaded: only names are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedskew.data._folder import is_image, tree
from fedskew.data._huggingface import names_in, saved_table
from fedskew.data._own import ordered
from fedskew.data._tables import read_arrays
from fedskew.errors import ArgumentError, DataError
from fedskew.names import CLASS_WORDS, CLIENT_WORDS, warn_of_look_alikes
from fedskew.sheets import Sheet, find_column

_EVERYONE = "all"


@dataclass(frozen=True)
class Holdings:
    """The label of every sample, and the client that holds it (None: the data name none); all names, in order."""

    labels: Sequence[str]
    clients: Sequence[str] | None
    class_names: tuple[str, ...]
    client_names: tuple[str, ...]


def holdings(path: Path, label: str | None = None, client: str | None = None) -> Holdings:
    """Read who holds which labels: a folder of images, an `.npz` file, a CSV file or a folder of Hugging Face.

    A test part does not count.

    Args:
        path: The folder or file, as the readers "folder", "npz", "csv" and "huggingface" take it. In a folder of images
            the first level names clients where it holds no images.
        label: Column of labels, in a table; None: the one that is called so.
        client: Column of clients, in a table; None: the one that is called so, if there is one.

    Raises:
        DataError: It can't be read, or names no labels.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_dir():
        saved = any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))
        return _of_huggingface(path, label, client) if saved else _of_images(path)
    return _of_arrays(path) if path.suffix.lower() == ".npz" else _of_table(path, label, client)


def _made(
    path: Path,
    labels: Sequence[str],
    clients: Sequence[str] | None,
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
) -> Holdings:
    if not labels:
        raise DataError(f"{path}: holds no samples")
    classes = tuple(class_names) or ordered(labels)
    owners = (_EVERYONE,) if clients is None else ordered({*clients, *client_names})
    warn_of_look_alikes(classes, "classes", path)
    warn_of_look_alikes(owners, "clients", path)
    return Holdings(labels, clients, classes, owners)


def _of_images(path: Path) -> Holdings:
    top = path / "train" if (path / "train").is_dir() else path
    folders = [folder for folder in top.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    client_level = not any(is_image(file) for folder in folders for file in folder.iterdir())
    found = tree(top, client_level)
    clients = [image.client or "" for image in found.images] if client_level else None
    return _made(path, [image.label for image in found.images], clients, ordered(found.classes), list(found.clients))


def _of_arrays(path: Path) -> Holdings:
    arrays = read_arrays(path, ("y", "client"))
    if "y" not in arrays:
        raise DataError(f"{path}: has no array 'y' of labels")
    labels, clients = (
        None if name not in arrays else [str(value) for value in arrays[name].ravel().tolist()]
        for name in ("y", "client")
    )
    assert labels is not None
    if clients is not None and len(clients) != len(labels):
        raise DataError(f"{path}: 'client' has {len(clients)} entries and 'y' {len(labels)}")
    return _made(path, labels, clients)


def _of_table(path: Path, label: str | None, client: str | None) -> Holdings:
    sheet = Sheet(path, "a header line, then one sample a line", error=DataError)
    place, owner = sheet.column("label", CLASS_WORDS, label), sheet.column("client", CLIENT_WORDS, client)
    if place is None:
        listed = ", ".join(sheet.header)
        sheet.fail(sheet.line, f"no column of labels; say by --label which it is (it has: {listed})")
    return _made(path, sheet.texts(place, "class"), None if owner is None else sheet.texts(owner, "client"))


def _of_huggingface(path: Path, label: str | None, client: str | None) -> Holdings:
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
    owners = None if owner is None else names_in(part, part.column_names[owner])
    return _made(path, names_in(part, label), owners, list(getattr(part.features[label], "names", None) or []))
