"""iWildCam 2020 as WILDS divides it (Beery et al. 2020; Koh et al., "WILDS", ICML 2021), version 2.0."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedskew.data._dataset import Dataset, label_mix, names_clients
from fedskew.data._files import damaged, read
from fedskew.data._image_files import IMAGENET_MEAN, IMAGENET_STD, ImageFiles, check_count
from fedskew.data._stored import Stored
from fedskew.errors import ArgumentError

_PAGE = "https://wilds.stanford.edu/datasets/#iwildcam"
_SPLITS = {"train": 129_809, "val": 14_961, "test": 42_791, "id_val": 7_314, "id_test": 8_154}
_CLASSES = 182


class _Row(NamedTuple):
    split: str
    camera: int
    label: int
    file: str


@names_clients
def iwildcam(
    root: Path,
    validation_split: Literal["val", "id_val"] | None = "val",
    test: Literal["test", "id_test"] = "test",
    size: int = 448,
    packed: bool = False,
    verify: bool = True,
) -> Dataset:
    """Read iWildCam: colour images from camera traps, 182 classes (one is "empty"), 129,809 images for training.

    Each of the 243 training cameras (`location_remapped`) is a natural client. The label mix of the test part is the
    target. Images are normalised by ImageNet's means 0.485, 0.456, 0.406 and deviations 0.229, 0.224, 0.225.

    Args:
        root: Holds `iwildcam_v2.0/` with `metadata.csv`, optionally `categories.csv` for class names, and all images in
            `train/`.
        validation_split: Split that the data set itself sets aside: 14,961 images of 32 other cameras ("val"), 7,314 of
            the training cameras ("id_val"), or None.
        test: Test part: 42,791 images of 48 other cameras ("test"), or 8,154 of the training cameras ("id_test").
        size: Side in pixels to which images are resized (WILDS: 448).
        packed: Decode once into one file (see `ImageFiles.pack`), which at 448 takes 112 GB; else batch by batch.
        verify: Check the splits against their published sizes.
    """
    if size < 1:
        raise ArgumentError(f"size: must be a side in pixels, got {size}")
    folder = root / "iwildcam_v2.0"
    rows = _rows(folder / "metadata.csv")
    if verify:
        for split, expected in _SPLITS.items():
            check_count(folder, sum(row.split == split for row in rows), expected, _PAGE)
    kept, held, tested = ([row for row in rows if row.split == split] for split in ("train", validation_split, test))
    if not kept or not tested:
        raise damaged(folder / "metadata.csv", "it has no row of split train, or none of the test split", _PAGE)
    cameras = sorted({row.camera for row in kept})
    client = {camera: index for index, camera in enumerate(cameras)}
    classes = max(row.label for row in rows) + 1
    if verify and classes != _CLASSES:
        raise damaged(folder / "metadata.csv", f"it has {classes} classes, expected {_CLASSES}", _PAGE)

    def images(found: list[_Row], part: str) -> Stored:
        names = tuple(f"train/{row.file}" for row in found)
        files = ImageFiles(folder, names, (size, size), IMAGENET_MEAN, IMAGENET_STD, _PAGE)
        return files.pack(part) if packed else files

    test_labels = [row.label for row in tested]
    return Dataset(
        name="iwildcam",
        inputs=images(kept + held, "train"),
        targets=torch.tensor([row.label for row in kept + held]),
        test_inputs=images(tested, test),
        test_targets=torch.tensor(test_labels),
        classes=_names(folder / "categories.csv", classes),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        clients=np.array([client[row.camera] for row in kept] + [-1] * len(held)),
        client_names=tuple(f"camera {camera}" for camera in cameras),
        target=label_mix(test_labels, classes),
        validation=np.arange(len(kept), len(kept) + len(held)) if held else None,
    )


def _rows(path: Path) -> list[_Row]:
    found = []
    for line, row in enumerate(_table(path), start=2):
        try:
            found.append(_Row(row["split"], int(row["location_remapped"]), int(row["y"]), row["filename"]))
        except (KeyError, TypeError, ValueError):
            columns = "split, location_remapped, y, filename"
            raise damaged(path, f"line {line} lacks one of {columns}, or holds no number", _PAGE) from None
        if found[-1].label < 0 or not found[-1].file:
            raise damaged(path, f"line {line} has label {found[-1].label} and file {found[-1].file!r}", _PAGE)
    return found


def _names(path: Path, classes: int) -> tuple[str, ...]:
    """Return class names by class id; the id itself where there is no name."""
    rows = _table(path) if path.exists() else []
    found = {row.get("y"): row.get("name") for row in rows}
    return tuple(found.get(str(label)) or str(label) for label in range(classes))


def _table(path: Path) -> list[dict[str, str]]:
    text = read(path, "a CSV file", _PAGE).decode("utf-8", "replace")
    try:
        return list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise damaged(path, f"it can't be read as CSV ({error})", _PAGE) from None
