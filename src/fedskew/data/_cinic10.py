"""CINIC-10 (Darlow, Crowley, Antoniou, Storkey, "CINIC-10 Is Not ImageNet or CIFAR-10", 2018)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.data._pictures import Pictures, check_count, listed, stored

_PAGE = "https://datashare.ed.ac.uk/handle/10283/3192"
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_EACH = 9_000
_MEAN, _STD = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)


def cinic10(
    root: Path, valid: Literal["unused", "train", "own"] = "unused", packed: bool = True, verify: bool = True
) -> Dataset:
    """90,000 colour pictures of 32 x 32 for training and 90,000 for test, in CIFAR-10's ten classes.

    Reads `root/cinic-10/train/CLASS/*.png` and `test/CLASS/*.png`. `valid`: what to do with the 90,000 of `valid/`:
    leave them, train on them too ("train"), or set them aside as the data set's own validation part ("own").
    Normalised by channel with the authors' means 0.4789, 0.4723, 0.4305 and deviations 0.2421, 0.2383, 0.2587 (to eight
    decimals). `packed`: decode once into one file (see `data/_pictures.py`), 280 MB a part, else batch by batch.
    `verify`: hold the folders to the published numbers of pictures.
    """
    folder = root / "cinic-10"
    names, targets = _part(folder, "train", verify)
    validation = None
    if valid != "unused":
        more, more_targets = _part(folder, "valid", verify)
        if valid == "own":
            validation = np.arange(len(names), len(names) + len(more))
        names, targets = names + more, torch.cat([targets, more_targets])
    test_names, test_targets = _part(folder, "test", verify)

    def pictures(part: str, found: list[str]) -> Pictures:
        return Pictures(folder, tuple(found), (32, 32), _MEAN, _STD, _PAGE)

    return Dataset(
        name="cinic10",
        inputs=stored(pictures("train", names), "train" if valid == "unused" else "train+valid", packed),
        targets=targets,
        test_inputs=stored(pictures("test", test_names), "test", packed),
        test_targets=test_targets,
        classes=_CLASSES,
        mean=_MEAN,
        std=_STD,
        validation=validation,
    )


def _part(folder: Path, part: str, verify: bool) -> tuple[list[str], Tensor]:
    """Pictures class by class, and their labels."""
    names: list[str] = []
    sizes = []
    for label in _CLASSES:
        found = listed(folder, f"{part}/{label}", _PAGE)
        if verify:
            check_count(folder / part / label, len(found), _EACH, _PAGE)
        names += found
        sizes.append(len(found))
    return names, torch.arange(len(_CLASSES)).repeat_interleave(torch.tensor(sizes))
