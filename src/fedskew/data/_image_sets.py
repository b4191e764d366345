"""Data sets that are published as image files: CINIC-10, Tiny ImageNet, PACS and iWildCam."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data.published import IMAGENET, ImageFiles, Source
from fedskew.errors import ArgumentError

_WILD_TABLE = "metadata.csv"


@dataclass
class _Part:
    """Images with their labels and their sources: domains, or cameras."""

    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def add(self, name: str, label: int, source: int = 0) -> None:
        self.names.append(name)
        self.labels.append(label)
        self.sources.append(source)

    def label_mix(self, classes: int) -> NDArray[np.float64]:
        """Return the share of each class, `(classes,)`."""
        counts = np.bincount(self.labels, minlength=classes).astype(np.float64)
        mix: NDArray[np.float64] = counts / max(counts.sum(), 1.0)
        return mix


def _dataset(
    name: str,
    files: ImageFiles,
    parts: tuple[_Part, _Part, _Part],
    classes: tuple[str, ...],
    packed: tuple[str, str] | None,
    **more: Any,
) -> Dataset:
    """Return a data set of images to train on, to set aside and to test on.

    They lie and are normalised as `files` says; `packed` names two files into which they are decoded once.
    """
    train, held, test = parts
    inputs, test_inputs = (replace(files, names=tuple(names)) for names in (train.names + held.names, test.names))
    return Dataset(
        name,
        inputs.pack(packed[0]) if packed else inputs,
        torch.tensor(train.labels + held.labels),
        test_inputs.pack(packed[1]) if packed else test_inputs,
        torch.tensor(test.labels),
        classes,
        files.mean,
        files.std,
        validation=np.arange(len(train.names), len(train.names + held.names)) if held.names else None,
        **more,
    )


def cinic10(
    root: Path, valid: Literal["unused", "train", "own"] = "unused", packed: bool = True, verify: bool = True
) -> Dataset:
    """Read CINIC-10: 90,000 colour images of 32 x 32 for training and 90,000 for test, in CIFAR-10's ten classes.

    Darlow, Crowley, Antoniou, Storkey, "CINIC-10 Is Not ImageNet or CIFAR-10", 2018. From
    `cinic-10/train/CLASS/*.png`, `test/` and `valid/`. Normalised by channel with the authors' means 0.4789, 0.4723,
    0.4305 and deviations 0.2421, 0.2383, 0.2587 (to eight decimals).

    Args:
        valid: What to do with the 90,000 images of `valid/`: ignore them, train on them too ("train"), or set them
            aside as the data set's own validation part ("own").
        packed: Decode once into one file (see `ImageFiles.pack`), 280 MB a part; else batch by batch.
        verify: Check the folders against the published numbers of images.
    """
    source = Source.of("cinic10", root, verify)

    def part(name: str) -> _Part:
        return _Part(*source.class_folders([f"{name}/{label}" for label in source.classes], source.facts["each"]))

    train, test = part("train"), part("test")
    held = part("valid") if valid != "unused" else _Part()
    whole = _dataset(
        "cinic10",
        ImageFiles(source, (), (32, 32), *source.moments),
        (train, held, test),
        source.classes,
        ("train" if valid == "unused" else "train+valid", "test") if packed else None,
    )
    return replace(whole, validation=None) if valid == "train" else whole


def tiny_imagenet(root: Path, packed: bool = True, verify: bool = True) -> Dataset:
    """Read Tiny ImageNet (Stanford's CS231n): 100,000 colour images of 64 x 64, 500 a class, and 10,000 for test.

    From `tiny-imagenet-200/` with `wnids.txt`, `words.txt`, `train/WNID/images/*.JPEG`, `val/val_annotations.txt` and
    `val/images/*.JPEG`. The test part is the published `val` (the labels of `test/` are not public). Class ids follow
    the sorted WordNet ids, as torchvision's ImageFolder numbers them. Normalised as
    ImageNet's images are.

    Args:
        packed: Decode once into one file (see `ImageFiles.pack`), 1.2 GB; else batch by batch.
        verify: Check the folders against the published numbers of images.
    """
    source, annotations = Source.of("tiny_imagenet", root, verify), "val/val_annotations.txt"
    facts = source.facts
    ids = sorted(" ".join(source.lines("wnids.txt")).split())
    if verify and len(ids) != facts["number_of_classes"]:
        raise source.damaged("wnids.txt", f"it names {len(ids)} classes, expected {facts['number_of_classes']}")
    train, test = _Part(*source.class_folders([f"train/{wnid}/images" for wnid in ids], facts["each"])), _Part()
    number = {wnid: index for index, wnid in enumerate(ids)}
    for line, row in enumerate(source.lines(annotations), start=1):
        file, wnid, *_ = [*row.split("\t"), ""]  # and a box
        if wnid not in number:
            raise source.damaged(annotations, f"line {line} names no image and class")
        test.add(f"val/images/{file}", number[wnid])
    source.check_count("val", len(test.names), facts["test"])
    words = dict(row.split("\t", 1) for row in source.lines("words.txt") if "\t" in row)
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in ids)
    files = ImageFiles(source, (), (64, 64), *IMAGENET)
    return _dataset("tiny_imagenet", files, (train, _Part(), test), classes, ("train", "val") if packed else None)


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

    Li, Yang, Song, Hospedales, "Deeper, Broader and Artier Domain Generalization", ICCV 2017. From
    `PACS/DOMAIN/CLASS/`. The label mix of the test part is the target. Images are normalised as
    ImageNet's are.

    Args:
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
    source = Source.of("pacs", root, verify)
    classes, domains = source.classes, tuple(source.facts["domains"])
    used = [*train, *([validation_domain] if validation_domain is not None else []), test]
    if not train or len(set(used)) != len(used) or not set(used) <= set(domains):
        raise ArgumentError(
            f"train, validation_domain, test: expected domains among {', '.join(domains)}, each once; got {used}"
        )
    if unknown := set(leave_out) - set(classes):
        raise ArgumentError(f"leave_out: got {unknown.pop()!r}, expected class names among {', '.join(classes)}")
    if size < 1:
        raise ArgumentError(f"size: got {size}, expected a side in pixels")
    trained, held = _domains(source, train, "train" if kfold else None), _Part()
    if validation_domain is not None:
        held = _domains(source, [validation_domain], None, leave_out)
    elif kfold:
        held = _domains(source, train, "crossval", leave_out)
    tested = _domains(source, [test], "test" if kfold else None, leave_out)
    return _dataset(
        "pacs",
        ImageFiles(source, (), (size, size), *IMAGENET),
        (trained, held, tested),
        classes,
        ("train", "test") if packed else None,
        target=tested.label_mix(len(classes)),
        domains=np.array(trained.sources + held.sources),
        test_domains=np.array(tested.sources),
        domain_names=domains,
    )


def _domains(source: Source, domains: Sequence[str], fold: str | None, leave_out: Sequence[str] = ()) -> _Part:
    """Return all images of some domains, or the images that one of the domains' fold files lists."""
    part, numbers = _Part(), source.facts["domains"]
    for domain in domains:
        if fold is None:
            names, labels = source.class_folders([f"{domain}/{name}" for name in source.classes])
            source.check_count(domain, len(names), numbers[domain])
        else:
            names, labels = _fold(source, f"{domain}_{fold}_kfold.txt")
        for name, label in zip(names, labels, strict=True):
            if source.classes[label] not in leave_out:
                part.add(name, label, list(numbers).index(domain))
    return part


def _fold(source: Source, file: str) -> tuple[list[str], list[int]]:
    """Read a fold file: a line is a path below the folder and a label from 1."""
    names, labels = [], []
    for line, row in enumerate(source.lines(file), start=1):
        name, _, label = row.strip().rpartition(" ")
        if label not in tuple("1234567") or not name:
            raise source.damaged(file, f"line {line} is no image and label from 1 to 7")
        names.append(name)
        labels.append(int(label) - 1)
    return names, labels


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

    iWildCam 2020 (Beery et al.) as WILDS divides it (Koh et al., ICML 2021), version 2.0. From `iwildcam_v2.0/` with
    `metadata.csv`, optionally `categories.csv` for class names, and all images in `train/`. Each of the 243 training
    cameras (`location_remapped`) is a natural client. The label mix of the test part is the target. Images are
    normalised as ImageNet's are.

    Args:
        validation_split: Split that the data set itself sets aside: 14,961 images of 32 other cameras ("val"), 7,314 of
            the training cameras ("id_val"), or None.
        test: Test part: 42,791 images of 48 other cameras ("test"), or 8,154 of the training cameras ("id_test").
        size: Side in pixels to which images are resized (WILDS: 448).
        packed: Decode once into one file (see `ImageFiles.pack`), which at 448 takes 112 GB; else batch by batch.
        verify: Check the splits against their published sizes.
    """
    if size < 1:
        raise ArgumentError(f"size: must be a side in pixels, got {size}")
    source = Source.of("iwildcam", root, verify)
    splits, expected_classes = _splits(source), source.facts["number_of_classes"]
    for split, expected in source.facts["splits"].items():
        source.check_count("", len(splits[split].names), expected)
    trained, tested = splits["train"], splits[test]
    held = _Part() if validation_split is None else splits[validation_split]
    if not trained.names or not tested.names:
        raise source.damaged(_WILD_TABLE, "it has no row of split train, or none of the test split")
    cameras, owners = np.unique(trained.sources, return_inverse=True)
    classes = max(max(part.labels, default=0) for part in splits.values()) + 1
    if verify and classes != expected_classes:
        raise source.damaged(_WILD_TABLE, f"it has {classes} classes, expected {expected_classes}")
    rows = _table(source, "categories.csv") if (source.folder / "categories.csv").exists() else []
    names = {row.get("y"): row.get("name") for row in rows}
    return _dataset(
        "iwildcam",
        ImageFiles(source, (), (size, size), *IMAGENET),
        (trained, held, tested),
        tuple(names.get(str(label)) or str(label) for label in range(classes)),
        ("train", test) if packed else None,
        clients=np.append(owners, [-1] * len(held.names)).astype(np.int64),
        client_names=tuple(f"camera {camera}" for camera in cameras.tolist()),
        target=tested.label_mix(classes),
    )


def _splits(source: Source) -> dict[str, _Part]:
    """Return the images of each split, with their cameras."""
    splits = {split: _Part() for split in source.facts["splits"]}
    for line, row in enumerate(_table(source, _WILD_TABLE), start=2):
        try:
            split, camera, label, file = row["split"], int(row["location_remapped"]), int(row["y"]), row["filename"]
        except (KeyError, TypeError, ValueError):
            columns = "split, location_remapped, y, filename"
            raise source.damaged(_WILD_TABLE, f"line {line} lacks one of {columns}, or holds no number") from None
        if label < 0 or not file:
            raise source.damaged(_WILD_TABLE, f"line {line} has label {label} and file {file!r}")
        splits.setdefault(split, _Part()).add(f"train/{file}", label, camera)
    return splits


def _table(source: Source, name: str) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(source.lines(name)))
    except csv.Error as error:
        raise source.damaged(name, f"it can't be read as CSV ({error})") from None
