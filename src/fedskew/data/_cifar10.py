"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009), the authors' Python version."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._files import read_checked

_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_TRAIN = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
}
_TEST = {"test_batch": "40351d587109b95175f43aff81a1287e"}
_META = {"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"}
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_BATCH = 10_000


def cifar10(root: Path) -> Dataset:
    """50,000 and 10,000 colour pictures of 32 x 32 in ten classes.

    Reads `root/cifar-10-batches-py/`. Normalised by channel with means 0.4914, 0.4822, 0.4465 and deviations 0.2470,
    0.2435, 0.2616.
    """
    folder = root / "cifar-10-batches-py"
    (names,) = (_unpickle(folder / file, md5)["label_names"] for file, md5 in _META.items())
    inputs, targets = _read(folder, _TRAIN)
    test_inputs, test_targets = _read(folder, _TEST)
    return Dataset(
        name="cifar10",
        inputs=inputs,
        targets=targets,
        test_inputs=test_inputs,
        test_targets=test_targets,
        classes=tuple(names),
        mean=_MEAN,
        std=_STD,
    )


def _read(folder: Path, files: dict[str, str]) -> tuple[Tensor, Tensor]:
    """Normalised pictures and labels, batch by batch into the tensors that are kept."""
    inputs = torch.empty(_BATCH * len(files), 3, 32, 32)
    targets = torch.empty(_BATCH * len(files), dtype=torch.int64)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    for index, (file, md5) in enumerate(files.items()):
        batch = _unpickle(folder / file, md5)
        rows = slice(index * _BATCH, (index + 1) * _BATCH)
        targets[rows] = torch.tensor(batch["labels"])
        part = inputs[rows]
        part.copy_(torch.from_numpy(batch["data"]).view(-1, 3, 32, 32))
        part.div_(255).sub_(mean).div_(std)
    return inputs, targets


def _unpickle(path: Path, md5: str) -> dict[str, Any]:
    content: dict[str, Any] = _Unpickler(io.BytesIO(read_checked(path, md5, _PAGE)), encoding="latin1").load()
    return content


class _Unpickler(pickle.Unpickler):
    """Builds numpy arrays and plain values, and nothing else. The files name numpy's modules as of numpy 1."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        raise pickle.UnpicklingError(f"a CIFAR-10 file has no use for {module}.{name}")


def _reconstruct(kind: type[np.ndarray[Any, Any]], shape: tuple[int, ...], code: bytes) -> np.ndarray[Any, Any]:
    """What numpy's own function of this name does: an empty array, filled by the state that follows."""
    return kind.__new__(kind, shape, "b")


def _dtype(name: str, align: int, copy: int) -> np.dtype[Any]:
    """Python 2 wrote the flags as integers, which numpy no longer takes."""
    return np.dtype(name, bool(align), bool(copy))
