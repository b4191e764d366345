"""CINIC-10 (Darlow, Crowley, Antoniou, Storkey, "CINIC-10 Is Not ImageNet or CIFAR-10", 2018)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedskew.data._dataset import Dataset
from fedskew.data._image_files import ImageFiles, class_folders
from fedskew.data._stored import Stored

_PAGE = "https://datashare.ed.ac.uk/handle/10283/3192"
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_EACH = 9_000
_MEAN, _STD = (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)


def cinic10(
    root: Path, valid: Literal["unused", "train", "own"] = "unused", packed: bool = True, verify: bool = True
) -> Dataset:
    """Read CINIC-10: 90,000 colour images of 32 x 32 for training and 90,000 for test, in CIFAR-10's ten classes.

    Normalised by channel with the authors' means 0.4789, 0.4723, 0.4305 and deviations 0.2421, 0.2383, 0.2587 (to eight
    decimals).

    Args:
        root: Holds `cinic-10/train/CLASS/*.png`, `test/` and `valid/`.
        valid: What to do with the 90,000 images of `valid/`: ignore them, train on them too ("train"), or set them
            aside as the data set's own validation part ("own").
        packed: Decode once into one file (see `ImageFiles.pack`), 280 MB a part; else batch by batch.
        verify: Check the folders against the published numbers of images.
    """
    folder = root / "cinic-10"

    def part(name: str) -> tuple[list[str], list[int]]:
        return class_folders(folder, [f"{name}/{label}" for label in _CLASSES], _PAGE, _EACH if verify else None)

    names, targets = part("train")
    validation = None
    if valid != "unused":
        more, more_targets = part("valid")
        if valid == "own":
            validation = np.arange(len(names), len(names) + len(more))
        names, targets = names + more, targets + more_targets
    test_names, test_targets = part("test")

    def images(found: list[str], part: str) -> Stored:
        files = ImageFiles(folder, tuple(found), (32, 32), _MEAN, _STD, _PAGE)
        return files.pack(part) if packed else files

    return Dataset(
        name="cinic10",
        inputs=images(names, "train" if valid == "unused" else "train+valid"),
        targets=torch.tensor(targets),
        test_inputs=images(test_names, "test"),
        test_targets=torch.tensor(test_targets),
        classes=_CLASSES,
        mean=_MEAN,
        std=_STD,
        validation=validation,
    )
