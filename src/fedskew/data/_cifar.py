"""CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009).

Both are read from the authors' Python version: Python 2 pickles, read without executing anything in them.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedskew.data._dataset import Arrays, Dataset
from fedskew.data._images import of_bytes
from fedskew.data.published import Source


def cifar10(root: Path, verify: bool = True) -> Dataset:
    """Read CIFAR-10: 50,000 and 10,000 colour images of 32 x 32 in ten classes.

    From `cifar-10-batches-py/`. Normalised by channel with means 0.4914, 0.4822, 0.4465 and deviations 0.2470, 0.2435,
    0.2616, those of the training pixels.

    Args:
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    source = Source.of("cifar10", root, verify)
    (names,) = _read(source, "batches.meta", "label_names")
    return of_bytes("cifar10", _arrays(source, "labels"), tuple(names), source.moments)


def cifar100(root: Path, superclasses: bool = False, verify: bool = True) -> Dataset:
    """Read CIFAR-100: 50,000 and 10,000 colour images of 32 x 32 in 100 classes, or in 20 superclasses of five each.

    From `cifar-100-python/`. Normalised by channel with means 0.5071, 0.4865, 0.4409 and deviations 0.2673, 0.2564,
    0.2762, those of the training pixels.

    Args:
        superclasses: Use the 20 superclasses as classes.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    source, level = Source.of("cifar100", root, verify), "coarse" if superclasses else "fine"
    (names,) = _read(source, "meta", f"{level}_label_names")
    return of_bytes("cifar100", _arrays(source, f"{level}_labels"), tuple(names), source.moments)


def _arrays(source: Source, labels: str) -> Arrays:
    """Return images, `(samples, 3, 32, 32)` uint8, and labels: those of the last batch are the test part.

    A row is the red plane, then green, then blue, each in row order.
    """
    pixels, targets = [], []
    for name in source.facts["batches"]:
        data, given = _read(source, name, "data", labels)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
            raise source.damaged(name, "its data is not uint8 (samples, 3072)")
        pixels.append(torch.from_numpy(data).view(-1, 3, 32, 32))
        try:
            targets.append(torch.tensor(given, dtype=torch.int64))
        except (TypeError, ValueError) as error:
            raise source.damaged(name, f"its {labels!r} are no whole numbers ({error})") from None
        if targets[-1].shape != (len(data),):
            raise source.damaged(name, f"has {len(data)} images and {len(targets[-1])} labels")
    return torch.cat(pixels[:-1]), torch.cat(targets[:-1]), pixels[-1], targets[-1]


def _read(source: Source, name: str, *entries: str) -> list[Any]:
    """Return some entries of the dict in a file."""
    content = source.read(name)
    try:
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise source.damaged(name, f"no pickle of arrays and plain values ({error})") from None
    if not isinstance(found, dict):
        raise source.damaged(name, f"holds a {type(found).__name__}, not a dict")
    for entry in entries:
        if entry not in found:
            raise source.damaged(name, f"has no {entry!r} (found: {', '.join(map(str, found))})")
    return [found[entry] for entry in entries]


class _Unpickler(pickle.Unpickler):
    """Builds numpy arrays and plain values only. The files name numpy's modules as of numpy 1."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        raise pickle.UnpicklingError(f"a CIFAR file has no use for {module}.{name}")


def _reconstruct(kind: type[np.ndarray[Any, Any]], shape: tuple[int, ...], code: bytes) -> np.ndarray[Any, Any]:
    """Return an empty array, filled by the state that follows, as numpy's own function of this name does."""
    return kind.__new__(kind, shape, "b")


def _dtype(name: str, align: int, copy: int) -> np.dtype[Any]:
    """Convert the flags to bool: Python 2 wrote integers, which numpy no longer takes."""
    return np.dtype(name, bool(align), bool(copy))
