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
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._images import of_bytes
from fedskew.data._published import damaged, read_checked
from fedskew.errors import DataError

_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

_CIFAR10 = {
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_CIFAR10_NORMAL = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

_CIFAR100 = {
    "meta": "7973b15100ade9c7d40fb424638fde48",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "train": "16019d7e3df5f24257cddd939b257f8d",
}
_CIFAR100_NORMAL = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def cifar10(root: Path, verify: bool = True) -> Dataset:
    """Read CIFAR-10: 50,000 and 10,000 colour images of 32 x 32 in ten classes.

    From `cifar-10-batches-py/`. Normalised by channel with means 0.4914, 0.4822, 0.4465 and deviations 0.2470, 0.2435,
    0.2616, those of the training pixels.

    Args:
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    folder = root / "cifar-10-batches-py"
    read = {file: _unpickle(folder / file, md5 if verify else None) for file, md5 in _CIFAR10.items()}
    names = _entry(read.pop("batches.meta"), folder / "batches.meta", "label_names")
    pixels = [_images(batch, folder / file) for file, batch in read.items()]
    labels = [
        _labels(batch, folder / file, "labels", len(own))
        for (file, batch), own in zip(read.items(), pixels, strict=True)
    ]
    arrays = torch.cat(pixels[:-1]), torch.cat(labels[:-1]), pixels[-1], labels[-1]
    return of_bytes("cifar10", arrays, tuple(names), *_CIFAR10_NORMAL)


def cifar100(root: Path, superclasses: bool = False, verify: bool = True) -> Dataset:
    """Read CIFAR-100: 50,000 and 10,000 colour images of 32 x 32 in 100 classes, or in 20 superclasses of five each.

    From `cifar-100-python/`. Normalised by channel with means 0.5071, 0.4865, 0.4409 and deviations 0.2673, 0.2564,
    0.2762, those of the training pixels.

    Args:
        superclasses: Use the 20 superclasses as classes.
        verify: Check files against their published MD5; False accepts other files in this format too.
    """
    folder, level = root / "cifar-100-python", "coarse" if superclasses else "fine"
    read = {file: _unpickle(folder / file, md5 if verify else None) for file, md5 in _CIFAR100.items()}
    arrays: list[Tensor] = []
    for part in ("train", "test"):
        arrays.append(_images(read[part], folder / part))
        arrays.append(_labels(read[part], folder / part, f"{level}_labels", len(arrays[-1])))
    names = _entry(read["meta"], folder / "meta", f"{level}_label_names")
    return of_bytes("cifar100", (arrays[0], arrays[1], arrays[2], arrays[3]), tuple(names), *_CIFAR100_NORMAL)


def _unpickle(path: Path, md5: str | None) -> dict[str, Any]:
    """Return the dict in a file; with `md5` None, whatever its checksum."""
    content = read_checked(path, md5, _PAGE)
    try:
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise damaged(path, f"no pickle of arrays and plain values ({error})", _PAGE) from None
    if not isinstance(found, dict):
        raise damaged(path, f"holds a {type(found).__name__}, not a dict", _PAGE)
    return found


def _entry(content: dict[str, Any], path: Path, name: str) -> Any:
    """Return one value of the dict; raise DataError if it is missing."""
    if name not in content:
        raise damaged(path, f"has no {name!r} (found: {', '.join(map(str, content))})", _PAGE)
    return content[name]


def _images(content: dict[str, Any], path: Path) -> Tensor:
    """Return `data`, `(samples, 3, 32, 32)` uint8: a row is the red plane, then green, then blue, each in row order."""
    data = _entry(content, path, "data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
        raise damaged(path, "its data is not uint8 (samples, 3072)", _PAGE)
    return torch.from_numpy(data).view(-1, 3, 32, 32)


def _labels(content: dict[str, Any], path: Path, name: str, samples: int) -> Tensor:
    """Return the labels of one name, `(samples,)` int64."""
    try:
        found = torch.tensor(_entry(content, path, name), dtype=torch.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: {name!r} holds no whole numbers ({error})") from None
    if found.shape != (samples,):
        raise damaged(path, f"has {samples} images and {len(found)} labels", _PAGE)
    return found


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
