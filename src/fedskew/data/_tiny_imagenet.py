"""Tiny ImageNet (Stanford's course CS231n): 200 classes of ImageNet, at 64 x 64."""

from __future__ import annotations

from pathlib import Path

import torch

from fedskew.data._dataset import Dataset
from fedskew.data._files import damaged, read
from fedskew.data._pictures import IMAGENET_MEAN, IMAGENET_STD, Pictures, check_count, listed, stored

_PAGE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
_CLASSES, _EACH, _TEST = 200, 500, 10_000


def tiny_imagenet(root: Path, packed: bool = True, verify: bool = True) -> Dataset:
    """100,000 colour pictures of 64 x 64 for training, 500 a class; the 10,000 of `val` are the test part.

    (The labels of the published `test/` are not public.) Reads `root/tiny-imagenet-200/`: `wnids.txt`, `words.txt`,
    `train/WNID/images/*.JPEG`, `val/val_annotations.txt`, `val/images/*.JPEG`. Class ids follow the sorted WordNet ids,
    as torchvision's ImageFolder numbers them. Normalised by ImageNet's means 0.485, 0.456, 0.406 and deviations 0.229,
    0.224, 0.225. `packed`: decode once into one file (see `data/_pictures.py`), 1.2 GB, else batch by batch. `verify`:
    hold the folders to the published numbers of pictures.
    """
    folder = root / "tiny-imagenet-200"
    ids = sorted(_text(folder / "wnids.txt").split())
    if verify and len(ids) != _CLASSES:
        raise damaged(folder / "wnids.txt", f"it names {len(ids)} classes, expected {_CLASSES}", _PAGE)
    number = {wnid: index for index, wnid in enumerate(ids)}
    names: list[str] = []
    sizes = []
    for wnid in ids:
        found = listed(folder, f"train/{wnid}/images", _PAGE)
        if verify:
            check_count(folder / "train" / wnid / "images", len(found), _EACH, _PAGE)
        names += found
        sizes.append(len(found))
    test_names, test_targets = _annotated(folder / "val" / "val_annotations.txt", number)
    if verify:
        check_count(folder / "val", len(test_names), _TEST, _PAGE)

    def pictures(found: list[str]) -> Pictures:
        return Pictures(folder, tuple(found), (64, 64), IMAGENET_MEAN, IMAGENET_STD, _PAGE)

    return Dataset(
        name="tiny_imagenet",
        inputs=stored(pictures(names), "train", packed),
        targets=torch.arange(len(ids)).repeat_interleave(torch.tensor(sizes)),
        test_inputs=stored(pictures(test_names), "val", packed),
        test_targets=torch.tensor(test_targets),
        classes=_named(folder / "words.txt", ids),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _annotated(path: Path, number: dict[str, int]) -> tuple[list[str], list[int]]:
    """Test pictures and their labels; a line is the file, the WordNet id, and a box."""
    names, targets = [], []
    for line, row in enumerate(_text(path).splitlines(), start=1):
        fields = row.split("\t")
        if len(fields) < 2 or fields[1] not in number:
            raise damaged(path, f"line {line} names no picture and class", _PAGE)
        names.append(f"val/images/{fields[0]}")
        targets.append(number[fields[1]])
    return names, targets


def _named(path: Path, ids: list[str]) -> tuple[str, ...]:
    """The first word that WordNet has for each id."""
    words = dict(row.split("\t", 1) for row in _text(path).splitlines() if "\t" in row)
    return tuple(words.get(wnid, wnid).split(",")[0] for wnid in ids)


def _text(path: Path) -> str:
    return read(path, "a text file", _PAGE).decode("utf-8", "replace")
