"""CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009), the authors' Python version."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._pickles import entry, labels, pictures, unpickle
from fedskew.data._pixels import normalised

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


def cifar10(root: Path, verify: bool = True) -> Dataset:
    """50,000 and 10,000 colour pictures of 32 x 32 in ten classes.

    Reads `root/cifar-10-batches-py/`. Normalised by channel with means 0.4914, 0.4822, 0.4465 and deviations 0.2470,
    0.2435, 0.2616, those of the training pixels. `verify`: hold files to their published MD5; false takes other files
    in this format too.
    """
    folder = root / "cifar-10-batches-py"
    ((meta, md5),) = _META.items()
    names = entry(unpickle(folder / meta, md5 if verify else None), folder / meta, "label_names")
    inputs, targets = _read(folder, _TRAIN, verify)
    test_inputs, test_targets = _read(folder, _TEST, verify)
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


def _read(folder: Path, files: dict[str, str], verify: bool) -> tuple[Tensor, Tensor]:
    """Normalised pictures and labels of some files, one after another."""
    pixels, targets = [], []
    for file, md5 in files.items():
        path = folder / file
        batch = unpickle(path, md5 if verify else None)
        pixels.append(pictures(batch, path))
        targets.append(labels(batch, path, "labels", len(pixels[-1])))
    return normalised(torch.cat(pixels), _MEAN, _STD), torch.cat(targets)
