"""A user's pictures as Pillow opens them, in any of its modes, as floats in [0, 1]."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedskew.errors import ArgumentError, DataError

_GREY = {"1", "L", "LA", "La"}
_DEEP = {"I", "I;16", "I;16L", "I;16B", "I;16N"}


def is_grey(mode: str) -> bool:
    """Whether pictures of this mode have one channel (transparency aside)."""
    return mode in _GREY | _DEEP


def sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """(height, width) from an option `size`."""
    if size is None:
        return None
    found = (size, size) if isinstance(size, int) else tuple(size)
    if len(found) != 2 or not all(isinstance(side, int) and side > 0 for side in found):
        raise ArgumentError(f"size: must be a side or (height, width) in pixels, got {size!r}")
    return found


def as_floats(image: Image.Image, shape: tuple[int, int, int], where: object) -> Tensor:
    """Values in [0, 1], `(channels, height, width)` as `shape` says: 1 channel or 3; resized (bilinear) where needed.

    16-bit grey is read in full. Raises DataError, naming `where` the picture is, for a deeper one.
    """
    channels, height, width = shape
    deep = image.mode in _DEEP
    flat = image.convert("F" if deep else "L" if channels == 1 else "RGB")
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(flat, dtype=np.float32) / (65535 if deep else 255))
    if pixels.max() > 1:
        raise DataError(f"{where}: is deeper than 16 bits")
    return pixels.permute(2, 0, 1) if pixels.dim() == 3 else pixels.unsqueeze(0)
