"""Images as tensors: decoded by Pillow, scaled to [0, 1], normalised by channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedskew.data._dataset import Arrays, Dataset, Inputs
from fedskew.errors import ArgumentError, DataError, in_one_line

Picture = tuple[str, Callable[[], AbstractContextManager[Any]]]
"""An image by its place, for messages, and what opens it."""

_GREY = {"1", "L", "LA", "La"}
_DEEP = {"I", "I;16", "I;16L", "I;16B", "I;16N"}


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file; whatever goes wrong with it inside the block raises DataError, which names it."""
    try:
        with Image.open(path) as image:
            yield image
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: can't be read as an image: there is no such file or folder") from None
    except Exception as error:  # a damaged file, or a bomb, can raise almost anything
        reason = error if isinstance(error, OSError | SyntaxError) else in_one_line(error)
        raise DataError(f"{path}: can't be read as an image: {reason}") from None


def is_grey(mode: str) -> bool:
    """Return whether images of this Pillow mode have one channel, apart from transparency."""
    return mode in _GREY | _DEEP


def sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (height, width) from the option `size`: a side, or both."""
    if size is None:
        return None
    found = (size, size) if isinstance(size, int) else tuple(size)
    if len(found) != 2 or not all(isinstance(side, int) and side > 0 for side in found):
        raise ArgumentError(f"size: must be a side or (height, width) in pixels, got {size!r}")
    return found


def read_pictures(parts: Sequence[Sequence[Picture]], size: int | tuple[int, int] | None) -> list[Tensor]:
    """Decode the images of some parts as values in [0, 1], (1 or 3 channels, height, width); grey if all are.

    Their sizes must not differ unless a `size`, a side or (height, width), is wanted.
    """
    wanted = sides(size)
    channels, first, common = 1, "", wanted or (0, 0)
    for where, open_one in chain(*parts):
        with open_one() as image:
            channels = channels if is_grey(image.mode) else 3
            first, common = (first, common) if first or wanted else (where, (image.height, image.width))
            if not wanted and (image.height, image.width) != common:
                raise DataError(
                    f"{where}: is {image.height} x {image.width} pixels, but {first} is {common[0]} x {common[1]}; set "
                    "size to resize all"
                )
    read = [torch.empty(len(part), channels, *common) for part in parts]
    for inputs, part in zip(read, parts, strict=True):
        for row, (where, open_one) in enumerate(part):
            with open_one() as image:
                inputs[row] = as_floats(image, (channels, *common), where)
    return read


def as_floats(image: Image.Image, shape: tuple[int, int, int], where: object) -> Tensor:
    """Return values in [0, 1] of `shape`, (1 or 3 channels, height, width), resized (bilinear) if needed."""
    channels, height, width = shape
    deep = image.mode in _DEEP
    flat = image.convert("F" if deep else "L" if channels == 1 else "RGB")
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(flat, dtype=np.float32) / (65535 if deep else 255))
    if pixels.max() > 1:
        raise DataError(f"{where}: is deeper than 16 bits")
    return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels.unsqueeze(0)


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scale uint8 images, `(samples, channels, height, width)`, to [0, 1], then normalise them by channel."""
    shift, scale = (torch.tensor(list(values), device=pixels.device).view(-1, 1, 1) for values in (mean, std))
    return pixels.float().div_(255).sub_(shift).div_(scale)


def of_bytes(
    name: str,
    arrays: Arrays,
    classes: tuple[str, ...],
    moments: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    held: Callable[..., Inputs] = normalised,
    **more: Any,
) -> Dataset:
    """Return a data set of uint8 images, normalised by `moments`, means and deviations, or by their own where None."""
    pixels, labels, test_pixels, test_labels = arrays
    mean, std = moments or statistics(pixels)
    inputs, test_inputs = held(pixels, mean, std), held(test_pixels, mean, std)
    return Dataset(name, inputs, labels, test_inputs, test_labels, classes, mean, std, **more)


def statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return exact mean and deviation by channel of uint8 images scaled to [0, 1], from the counts of each level."""
    levels, means, deviations = np.arange(256) / 255, [], []
    for channel in range(pixels.shape[1]):
        shares = np.zeros(256)
        for part in torch.split(pixels[:, channel], 10_000):
            shares += np.bincount(part.numpy().ravel(), minlength=256)
        shares /= shares.sum()
        means.append(float(shares @ levels))
        deviations.append(float(np.sqrt(shares @ (levels - means[-1]) ** 2)) or 1.0)
    return tuple(means), tuple(deviations)
