"""A user's own images, in a folder of class folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._images import as_floats, common_shape, sides
from fedskew.data._own import RawSamples, make
from fedskew.errors import DataError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}


class _Image(NamedTuple):
    path: Path
    label: str
    client: str | None


class _Tree(NamedTuple):
    """Images below one folder, and the names of its class and client folders, empty ones included."""

    images: list[_Image]
    classes: set[str]
    clients: set[str]


def folder(
    root: Path,
    rng: np.random.Generator | None,
    client_level: bool = False,
    size: int | tuple[int, int] | None = None,
    test_share: float = 0.2,
) -> Dataset:
    """Read a user's own images from class folders.

    Files are recognised by their suffix; others, and hidden ones, are ignored. Images are grey if every file is, else
    RGB; transparency is dropped; 16-bit grey keeps its precision. Pixels are scaled to [0, 1], then standardised by
    channel with mean and deviation of the training part.

    Args:
        root: Holds `CLASS/`, or `CLIENT/CLASS/` with `client_level`; or `train/` and `test/` with such folders in them.
        rng: Draws the samples to hold out.
        client_level: The first level of folders names clients.
        size: Side, or (height, width), to which images are resized (bilinear); by default all must have one size.
        test_share: Share of every class to hold out if there is no test part.
    """
    if not root.is_dir():
        raise DataError(f"{root}: is no folder")
    split = (root / "train").is_dir()
    train = _tree(root / "train" if split else root, client_level)
    test = _tree(root / "test", client_level) if split and (root / "test").is_dir() else None
    images = train.images + (test.images if test else [])
    shape = common_shape(map(_header, (image.path for image in images)), sides(size))
    return make(
        "folder",
        _read(train, shape, client_level),
        _read(test, shape, client_level) if test else None,
        test_share,
        rng,
        classes=train.classes | (test.classes if test else set()),
        clients=train.clients,
    )


def _tree(top: Path, client_level: bool) -> _Tree:
    tree = _Tree([], set(), set())
    for client in _folders(top) if client_level else [None]:
        if client is not None:
            tree.clients.add(client.name)
        for label in _folders(client or top):
            tree.classes.add(label.name)
            files = sorted(path for path in label.iterdir() if not path.name.startswith("."))
            found = [path for path in files if path.suffix.lower() in _SUFFIXES and path.is_file()]
            if not found and any(path.is_dir() for path in files):
                raise DataError(
                    f"{label}: holds folders and no images; if the first level names clients, set client_level = true"
                )
            owner = None if client is None else client.name
            tree.images.extend(_Image(path, label.name, owner) for path in found)
    if not tree.images:
        level = "CLIENT/CLASS" if client_level else "CLASS"
        raise DataError(f"{top}: found no images in {level} folders below it")
    return tree


def _folders(top: Path) -> Iterator[Path]:
    return (path for path in sorted(top.iterdir()) if path.is_dir() and not path.name.startswith("."))


def _header(path: Path) -> tuple[str, int, int, str]:
    """Return mode, height and width of an image file, and its path."""
    try:
        with Image.open(path) as image:
            return image.mode, image.height, image.width, str(path)
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path}: can't be read as an image: {error}") from None


def _read(tree: _Tree, shape: tuple[int, int, int], client_level: bool) -> RawSamples:
    inputs = torch.empty(len(tree.images), *shape)
    for row, image in enumerate(tree.images):
        inputs[row] = _pixels(image.path, shape)
    clients = [image.client or "" for image in tree.images] if client_level else None
    return RawSamples(inputs, [image.label for image in tree.images], clients)


def _pixels(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """Return values in [0, 1], `(1 or 3, height, width)`."""
    try:
        with Image.open(path) as image:
            return as_floats(image, shape, path)
    except (OSError, SyntaxError) as error:
        raise DataError(f"{path}: can't be read as an image: {error}") from None
