"""PACS (Li, Yang, Song, Hospedales, "Deeper, Broader and Artier Domain Generalization", ICCV 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedskew.data._dataset import Dataset, label_mix
from fedskew.data._files import damaged, read
from fedskew.data._image_files import IMAGENET_MEAN, IMAGENET_STD, ImageFiles, check_count, class_folders
from fedskew.data._stored import Stored
from fedskew.errors import ArgumentError

_PAGE = "https://domaingeneralization.github.io"
_DOMAINS = {"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929}
_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


class _Part(NamedTuple):
    """Images with their labels and domains."""

    names: list[str]
    labels: list[int]
    domains: list[int]

    def without(self, left_out: Sequence[str]) -> _Part:
        part = _Part([], [], [])
        for name, label, domain in zip(*self, strict=True):
            if _CLASSES[label] not in left_out:
                part.extend([name], [label], domain)
        return part

    def extend(self, names: list[str], labels: list[int], domain: int) -> None:
        self.names.extend(names)
        self.labels.extend(labels)
        self.domains.extend([domain] * len(names))


def pacs(
    root: Path,
    train: tuple[str, ...] = ("sketch", "cartoon"),
    validation_domain: str | None = "art_painting",
    test: str = "photo",
    leave_out: tuple[str, ...] = (),
    kfold: bool = False,
    size: int = 224,
    packed: bool = False,
    verify: bool = True,
) -> Dataset:
    """Read PACS: 9,991 images of seven classes from four domains: art_painting, cartoon, photo, sketch.

    The label mix of the test part is the target. Images are normalised by ImageNet's means 0.485, 0.456, 0.406 and
    deviations 0.229, 0.224, 0.225.

    Args:
        root: Holds `PACS/DOMAIN/CLASS/`.
        train: Domains of the training samples; the defaults of the domains are FedPALS's choice.
        validation_domain: Domain that the data set itself sets aside; None for none.
        test: Domain of the test part.
        leave_out: Classes to remove from the validation and test parts (FedPALS: giraffe).
        kfold: Use the authors' division: train on the images of `PACS/DOMAIN_train_kfold.txt`, test on those of
            `DOMAIN_test_kfold.txt`, and without a validation domain set aside those of the training domains'
            `DOMAIN_crossval_kfold.txt`.
        size: Side in pixels to which images are resized.
        packed: Decode once into one file (see `ImageFiles.pack`), 1.5 GB; else batch by batch.
        verify: Check the folders against the published numbers of images.
    """
    used = [*train, *([validation_domain] if validation_domain is not None else []), test]
    if not train or len(set(used)) != len(used) or not set(used) <= set(_DOMAINS):
        raise ArgumentError(
            f"train, validation_domain, test: expected domains among {', '.join(_DOMAINS)}, each once; got {used}"
        )
    for option, unknown in (("leave_out", set(leave_out) - set(_CLASSES)), ("size", {size} if size < 1 else set())):
        if unknown:
            raise ArgumentError(f"{option}: got {unknown.pop()!r}, expected {_EXPECTED[option]}")
    folder = root / "PACS"
    kept = _read(folder, train, "train" if kfold else None, verify)
    held = _Part([], [], [])
    if validation_domain is not None:
        held = _read(folder, [validation_domain], None, verify)
    elif kfold:
        held = _read(folder, train, "crossval", verify)
    held, tested = held.without(leave_out), _read(folder, [test], "test" if kfold else None, verify).without(leave_out)
    all_rows = _Part(kept.names + held.names, kept.labels + held.labels, kept.domains + held.domains)

    def images(part: _Part, name: str) -> Stored:
        files = ImageFiles(folder, tuple(part.names), (size, size), IMAGENET_MEAN, IMAGENET_STD, _PAGE)
        return files.pack(name) if packed else files

    return Dataset(
        name="pacs",
        inputs=images(all_rows, "train"),
        targets=torch.tensor(all_rows.labels),
        test_inputs=images(tested, "test"),
        test_targets=torch.tensor(tested.labels),
        classes=_CLASSES,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        target=label_mix(tested.labels, len(_CLASSES)),
        domains=np.array(all_rows.domains),
        test_domains=np.array(tested.domains),
        domain_names=tuple(_DOMAINS),
        validation=np.arange(len(kept.names), len(all_rows.names)) if held.names else None,
    )


_EXPECTED = {"leave_out": f"class names among {', '.join(_CLASSES)}", "size": "a side in pixels"}


def _read(folder: Path, domains: Sequence[str], fold: str | None, verify: bool) -> _Part:
    """Return all images of some domains, or the images that one of the domains' fold files lists."""
    part = _Part([], [], [])
    for domain in domains:
        names, labels = _whole(folder, domain, verify) if fold is None else _fold(folder, domain, fold)
        part.extend(names, labels, list(_DOMAINS).index(domain))
    return part


def _whole(folder: Path, domain: str, verify: bool) -> tuple[list[str], list[int]]:
    names, labels = class_folders(folder, [f"{domain}/{name}" for name in _CLASSES], _PAGE)
    if verify:
        check_count(folder / domain, len(names), _DOMAINS[domain], _PAGE)
    return names, labels


def _fold(folder: Path, domain: str, fold: str) -> tuple[list[str], list[int]]:
    """Read a fold file: a line is a path below the folder and a label from 1."""
    path = folder / f"{domain}_{fold}_kfold.txt"
    names, labels = [], []
    for line, row in enumerate(read(path, "a text file", _PAGE).decode("utf-8", "replace").splitlines(), start=1):
        name, _, label = row.strip().rpartition(" ")
        if label not in "1234567" or len(label) != 1 or not name:
            raise damaged(path, f"line {line} is no image and label from 1 to 7", _PAGE)
        names.append(name)
        labels.append(int(label) - 1)
    return names, labels
