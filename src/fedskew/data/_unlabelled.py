"""Samples without labels, for a trained model: images and arrays, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedskew.data._folder import is_image
from fedskew.data._images import as_floats, opened
from fedskew.data._tables import read_inputs
from fedskew.errors import DataError
from fedskew.names import SYSTEM_FOLDERS

BATCH = 256


class Unlabelled(NamedTuple):
    """A batch of samples without labels, and where they were read from."""

    names: list[str]
    inputs: Tensor
    resized: int


def unlabelled(paths: Sequence[Path], in_shape: tuple[int, ...]) -> Iterator[Unlabelled]:
    """Read samples without labels, at most 256 at a time, in the units that data sets are in before normalisation.

    Args:
        paths: Images; folders, in which images are looked for at any depth; `.npz` files, whose array `x` is read as by
            the reader "npz". Hidden files and files of other kinds in a folder are left out.
        in_shape: Shape of one sample of the model. Images become grey or RGB, as it says, and are resized (bilinear).

    Yields:
        The samples, in the order of the paths, those of a folder by name.

    Raises:
        DataError: There are none, one can't be read, or the model takes no images.
    """
    files = [file for path in paths for file in _files(path)]
    images: list[Path] = []
    for file in files:
        if file.suffix.lower() == ".npz":
            yield from _images(images, in_shape)
            images = []
            inputs = read_inputs(file)
            for start in range(0, len(inputs), BATCH):
                part = inputs[start : start + BATCH]
                yield Unlabelled([f"{file}[{start + row}]" for row in range(len(part))], part, 0)
        else:
            images.append(file)
    yield from _images(images, in_shape)


def _files(path: Path) -> list[Path]:
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


def _images(files: Sequence[Path], in_shape: tuple[int, ...]) -> Iterator[Unlabelled]:
    if files and (len(in_shape) != 3 or in_shape[0] not in (1, 3)):
        raise DataError(
            f"{files[0]}: the model takes samples of shape {in_shape}, no images; give an .npz file with an array x, "
            "or call fedskew.load(RUN).predict(array)"
        )
    for start in range(0, len(files), BATCH):
        part = files[start : start + BATCH]
        inputs, resized = torch.empty(len(part), *in_shape), 0
        for row, path in enumerate(part):
            with opened(path) as image:
                resized += image.size != in_shape[:0:-1]
                inputs[row] = as_floats(image, (in_shape[0], in_shape[1], in_shape[2]), path)
        yield Unlabelled([str(path) for path in part], inputs, resized)
