"""A user's own images: in a folder of class folders, or without labels, for a trained model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.data import _dicom
from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._images import Tray, Window, as_floats, opened, read_pictures, upright_size
from fedskew.data._own import RawSamples, make, read_inputs
from fedskew.data._schema import Encoder
from fedskew.errors import DataError, DataWarning
from fedskew.names import SYSTEM_FOLDERS

_BATCH = 256
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"} | _dicom.SUFFIXES


class _Image(NamedTuple):
    path: Path
    label: str
    client: str | None


class Tree(NamedTuple):
    """Images below one folder, and the names of its class and client folders, empty ones included."""

    images: list[_Image]
    classes: set[str]
    clients: set[str]

    @property
    def owners(self) -> list[str] | None:
        """The client of each image; None: the folders name none."""
        return [image.client or "" for image in self.images] if self.clients else None


@names_clients
def folder(
    root: Path,
    rng: np.random.Generator | None,
    client_level: bool = False,
    size: int | tuple[int, int] | None = None,
    test_share: float = 0.2,
    classes: dict[str, str] | None = None,
    window: tuple[float, ...] = (),
    skip_broken: bool = False,
) -> Dataset:
    """Read a user's own images from class folders.

    The root holds `CLASS/`, or `CLIENT/CLASS/` with `client_level`; or `train/` and `test/` with such folders in them.
    Files are recognised by their suffix; hidden ones are ignored, and a DataWarning names what else is left out. Images
    are turned as their EXIF data say, grey if every file is, else RGB; transparency is dropped. DICOM is read by
    pydicom (`fedskew[dicom]`). Pixels are scaled to [0, 1], then standardised by channel with mean and deviation of the
    training part.

    Args:
        client_level: The first level of folders names clients.
        size: Side, or (height, width), to which images are resized (bilinear); by default all must have one size.
        test_share: Share of every class to hold out if there is no test part.
        classes: The class of a folder by the folder's name, where that is another, as of a class "Sci/Tech".
        window: The values that are black and white in grey pictures of more than 8 bits, as [-1000, 400]; without it
            white is the largest of as many bits as the brightest pixel takes, and a DICOM file has its own.
        skip_broken: Leave out files that can't be read as images, and say which; else they are refused, all in one
            list.
    """
    if not root.is_dir():
        raise DataError(f"{root}: is no folder")
    split = (root / "train").is_dir()
    tops = [root / "train" if split else root, *([root / "test"] if split and (root / "test").is_dir() else [])]
    parts = [tree(top, client_level, classes or {}) for top in tops]
    listed = [[(str(path), partial(opened, path)) for path, *_ in part.images] for part in parts]
    read = read_pictures(listed, size, window, skip_broken)
    parts = [
        part._replace(images=[part.images[row] for row in kept]) for part, kept in zip(parts, read.kept, strict=True)
    ]
    train, *test = (
        RawSamples(values, [image.label for image in part.images], part.owners)
        for values, part in zip(read.parts, parts, strict=True)
    )
    return make(
        "folder",
        train,
        test[0] if test else None,
        test_share,
        rng,
        classes=set().union(*(part.classes for part in parts)),
        clients=parts[0].clients,
        window=read.window,
        skipped=read.broken,
        where=root,
    )


def tree(top: Path, client_level: bool, names: Mapping[str, str]) -> Tree:
    """List the images below a folder of class folders; a DataWarning says what is left out.

    `names` has the class of a folder by the folder's name, where that is another.
    """
    found = Tree([], set(), set())
    skipped: Counter[str] = Counter()
    for client in _folders(top, skipped) if client_level else [None]:
        if client is not None:
            found.clients.add(client.name)
        for label in _folders(client or top, skipped):
            name = names.get(label.name, label.name)
            found.classes.add(name)
            files = sorted(path for path in label.iterdir() if not path.name.startswith("."))
            images = [path for path in files if is_image(path)]
            if not images and any(path.is_dir() for path in files):
                raise DataError(
                    f"{label}: holds folders and no images; if the first level names clients, set client_level = true"
                )
            skipped.update(_kind(path) for path in files if not is_image(path))
            owner = None if client is None else client.name
            found.images.extend(_Image(path, name, owner) for path in images)
    _warn(top, skipped)
    if not found.images:
        level = "CLIENT/CLASS" if client_level else "CLASS"
        raise DataError(f"{top}: found no images in {level} folders below it")
    return found


def is_image(path: Path) -> bool:
    """Return whether a path is a file with the suffix of an image that can be read."""
    return path.is_file() and (path.suffix.lower() in _SUFFIXES or _dicom.is_dicom(path))


def _folders(top: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the folders below a folder that people made; what else lies there is counted as skipped."""
    for path in sorted(top.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir() and path.name not in SYSTEM_FOLDERS:
            yield path
        else:
            skipped[_kind(path)] += 1


def _kind(path: Path) -> str:
    """Return the warning about a path that was left out; none for files that operating systems add to folders."""
    if path.is_dir():
        return f"the folder {path.name}"
    if path.name.lower() in {"thumbs.db", "desktop.ini"}:
        return ""
    return path.suffix.lower() or "files without a suffix"


def _warn(top: Path, skipped: Counter[str]) -> None:
    del skipped[""]
    if not skipped:
        return
    listed = ", ".join(f"{kind} ({count:,})" if kind[0] == "." else kind for kind, count in skipped.most_common(5))
    number = skipped.total()
    are = "entry was left out, which is no image in a class folder"
    if number > 1:
        are = "entries were left out, which are no images in class folders"
    warnings.warn(
        f"{top}: {number:,} {are}: {listed}",
        DataWarning,
        stacklevel=2,
    )


class Unlabelled(NamedTuple):
    """A batch of samples without labels, where each was read from, and how many were resized images."""

    names: list[str]
    inputs: Tensor
    resized: int


def unlabelled(
    paths: Sequence[Path],
    in_shape: tuple[int, ...],
    window: Window = (),
    skip_broken: bool = False,
    encoder: Encoder | None = None,
) -> Iterator[Unlabelled]:
    """Read samples without labels in the units that data sets are in before normalisation; of images 256 at a time.

    Args:
        paths: Images; folders, in which images are looked for at any depth; `.npz` files, whose array `x` is read as by
            the reader "npz". Hidden files and files of other kinds in a folder are left out.
        in_shape: Shape of one sample of the model. Images become grey or RGB, as it says, and are resized (bilinear).
        window: What is black and white in pictures of more than 8 bits, as in training.
        skip_broken: Leave out images that can't be read, with a DataWarning; else they are refused, all in one list.
        encoder: Reads the files in place of that, but for `.npz`, where the model's samples come from an encoder.
    """
    if encoder is not None and any(path.suffix.lower() != ".npz" for path in paths):
        for path in paths:
            yield Unlabelled(*encoder.read(path), 0)
        return
    tray = Tray(skip_broken)
    files = [file for path in paths for file in _images_below(path)]
    images: list[Path] = []
    for file in files:
        if file.suffix.lower() == ".npz":
            yield from _of_images(images, in_shape, window, tray)
            images = []
            inputs = read_inputs(file)
            for start in range(0, len(inputs), _BATCH):
                part = inputs[start : start + _BATCH]
                yield Unlabelled([f"{file}[{start + row}]" for row in range(len(part))], part, 0)
        else:
            images.append(file)
    yield from _of_images(images, in_shape, window, tray)
    tray.close(len(files))


def _images_below(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*"))
        if is_image(file) and not any(_is_hidden(part) for part in file.relative_to(path).parts)
    ]
    if not found:
        raise DataError(f"{path}: holds no images")
    return found


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in SYSTEM_FOLDERS


def _of_images(files: Sequence[Path], in_shape: tuple[int, ...], window: Window, tray: Tray) -> Iterator[Unlabelled]:
    if files and (len(in_shape) != 3 or in_shape[0] not in (1, 3)):
        raise DataError(
            f"{files[0]}: the model takes samples of shape {in_shape}, no images; give an .npz file with an array x, "
            "or call fedskew.load(RUN).predict(array)"
        )
    for start in range(0, len(files), _BATCH):
        part, resized, read = [*files[start : start + _BATCH]], 0, list[Tensor]()
        for path in tuple(part):
            with tray.reading(part, path), opened(path) as image:
                tray.look(str(path), image)
                read.append(as_floats(image, (in_shape[0], in_shape[1], in_shape[2]), path, window).expand(in_shape))
                resized += upright_size(image) != in_shape[1:]
        if read:
            yield Unlabelled([str(path) for path in part], torch.stack(read), resized)
