"""Tiny ImageNet (Stanford's course CS231n): 200 classes of ImageNet, at 64 x 64."""

from __future__ import annotations

from pathlib import Path

import torch

from fedskew.data._dataset import Dataset
from fedskew.data._files import damaged, read
from fedskew.data._image_files import IMAGENET_MEAN, IMAGENET_STD, ImageFiles, check_count, class_folders
from fedskew.data._stored import Stored

_PAGE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_CLASSES, _EACH, _TEST = 200, 500, 10_000


def tiny_imagenet(root: Path, packed: bool = True, verify: bool = True) -> Dataset:
    """Read Tiny ImageNet: 100,000 colour images of 64 x 64 for training, 500 a class, and 10,000 for test.

    The test part is the published `val` (the labels of `test/` are not public). Class ids follow the sorted WordNet
    ids, as torchvision's ImageFolder numbers them. Normalised by ImageNet's means 0.485, 0.456, 0.406 and deviations
    0.229, 0.224, 0.225.

    Args:
        root: Holds `tiny-imagenet-200/` with `wnids.txt`, `words.txt`, `train/WNID/images/*.JPEG`,
            `val/val_annotations.txt` and `val/images/*.JPEG`.
        packed: Decode once into one file (see `ImageFiles.pack`), 1.2 GB; else batch by batch.
        verify: Check the folders against the published numbers of images.
    """
    folder = root / "tiny-imagenet-200"
    ids = sorted(_text(folder / "wnids.txt").split())
    if verify and len(ids) != _CLASSES:
        raise damaged(folder / "wnids.txt", f"it names {len(ids)} classes, expected {_CLASSES}", _PAGE)
    number = {wnid: index for index, wnid in enumerate(ids)}
    folders = [f"train/{wnid}/images" for wnid in ids]
    names, targets = class_folders(folder, folders, _PAGE, _EACH if verify else None)
    test_names, test_targets = _annotated(folder / "val" / "val_annotations.txt", number)
    if verify:
        check_count(folder / "val", len(test_names), _TEST, _PAGE)

    def images(found: list[str], part: str) -> Stored:
        files = ImageFiles(folder, tuple(found), (64, 64), IMAGENET_MEAN, IMAGENET_STD, _PAGE)
        return files.pack(part) if packed else files

    return Dataset(
        name="tiny_imagenet",
        inputs=images(names, "train"),
        targets=torch.tensor(targets),
        test_inputs=images(test_names, "val"),
        test_targets=torch.tensor(test_targets),
        classes=_named(folder / "words.txt", ids),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _annotated(path: Path, number: dict[str, int]) -> tuple[list[str], list[int]]:
    """Return test images and their class ids; a line holds the file, the WordNet id and a box."""
    names, targets = [], []
    for line, row in enumerate(_text(path).splitlines(), start=1):
        fields = row.split("\t")
        if len(fields) < 2 or fields[1] not in number:
            raise damaged(path, f"line {line} names no image and class", _PAGE)
        names.append(f"val/images/{fields[0]}")
        targets.append(number[fields[1]])
    return names, targets


def _named(path: Path, ids: list[str]) -> tuple[str, ...]:
    """Return WordNet's first word for each id."""
    words = dict(row.split("\t", 1) for row in _text(path).splitlines() if "\t" in row)
    return tuple(words.get(wnid, wnid).split(",")[0] for wnid in ids)


def _text(path: Path) -> str:
    return read(path, "a text file", _PAGE).decode("utf-8", "replace")
