"""The Python 2 pickles of CIFAR-10 and CIFAR-100, read without running what is in them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew.data._files import damaged, read_checked
from fedskew.errors import DataError

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


def unpickle(path: Path, md5: str | None) -> dict[str, Any]:
    """The dict in a file; `md5` None: whatever the file's checksum. Raises DataError."""
    content = read_checked(path, md5, PAGE)
    try:
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise almost anything
        raise damaged(path, f"no pickle of arrays and plain values ({error})", PAGE) from None
    if not isinstance(found, dict):
        raise damaged(path, f"holds a {type(found).__name__}, not a dict", PAGE)
    return found


def entry(content: dict[str, Any], path: Path, name: str) -> Any:
    """One value of the dict. Raises DataError where it has none of this name."""
    if name not in content:
        raise damaged(path, f"has no {name!r} (found: {', '.join(map(str, content))})", PAGE)
    return content[name]


def pictures(content: dict[str, Any], path: Path) -> Tensor:
    """`data`, `(samples, 3, 32, 32)` uint8: a row is the red plane, then green, then blue, each in row order."""
    data = entry(content, path, "data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
        raise damaged(path, "its data is not uint8 (samples, 3072)", PAGE)
    return torch.from_numpy(data).view(-1, 3, 32, 32)


def labels(content: dict[str, Any], path: Path, name: str, samples: int) -> Tensor:
    """The labels of one name, `(samples,)` int64."""
    try:
        found = torch.tensor(entry(content, path, name), dtype=torch.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: {name!r} holds no whole numbers ({error})") from None
    if found.shape != (samples,):
        raise damaged(path, f"has {samples} pictures and {len(found)} labels", PAGE)
    return found


class _Unpickler(pickle.Unpickler):
    """Builds numpy arrays and plain values, and nothing else. The files name numpy's modules as of numpy 1."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        raise pickle.UnpicklingError(f"a CIFAR file has no use for {module}.{name}")


def _reconstruct(kind: type[np.ndarray[Any, Any]], shape: tuple[int, ...], code: bytes) -> np.ndarray[Any, Any]:
    """What numpy's own function of this name does: an empty array, filled by the state that follows."""
    return kind.__new__(kind, shape, "b")


def _dtype(name: str, align: int, copy: int) -> np.dtype[Any]:
    """Python 2 wrote the flags as integers, which numpy no longer takes."""
    return np.dtype(name, bool(align), bool(copy))
