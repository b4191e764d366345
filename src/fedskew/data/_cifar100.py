"""CIFAR-100 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009), in its Python version."""

from __future__ import annotations

from pathlib import Path

from fedskew.data._dataset import Dataset
from fedskew.data._pickles import entry, labels, pictures, unpickle
from fedskew.data._pixels import normalised

_MD5 = {
    "meta": "7973b15100ade9c7d40fb424638fde48",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "train": "16019d7e3df5f24257cddd939b257f8d",
}
_MEAN, _STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def cifar100(root: Path, superclasses: bool = False, verify: bool = True) -> Dataset:
    """50,000 and 10,000 colour pictures of 32 x 32 in 100 classes, or in their 20 `superclasses` of five classes each.

    Reads `root/cifar-100-python/`. Normalised by channel with means 0.5071, 0.4865, 0.4409 and deviations 0.2673,
    0.2564, 0.2762, those of the training pixels. `verify`: hold files to their published MD5; false takes other files
    in this format too.
    """
    folder, level = root / "cifar-100-python", "coarse" if superclasses else "fine"
    read = {file: unpickle(folder / file, md5 if verify else None) for file, md5 in _MD5.items()}
    inputs, test_inputs = (pictures(read[part], folder / part) for part in ("train", "test"))
    return Dataset(
        name="cifar100",
        inputs=normalised(inputs, _MEAN, _STD),
        targets=labels(read["train"], folder / "train", f"{level}_labels", len(inputs)),
        test_inputs=normalised(test_inputs, _MEAN, _STD),
        test_targets=labels(read["test"], folder / "test", f"{level}_labels", len(test_inputs)),
        classes=tuple(entry(read["meta"], folder / "meta", f"{level}_label_names")),
        mean=_MEAN,
        std=_STD,
    )
