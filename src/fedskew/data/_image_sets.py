"""Data sets that are published as image files: CINIC-10, Tiny ImageNet, PACS and iWildCam."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedskew.data._dataset import Dataset, FloatArray, names_clients
from fedskew.data.published import IMAGENET, ImageFiles, Rows, Source
from fedskew.errors import ArgumentError
from fedskew.parameters import Count

_WILD_TABLE = "metadata.csv"


def _dataset(
    name: str,
    files: ImageFiles,
    parts: tuple[Rows, Rows, Rows],
    classes: tuple[str, ...],
    packed: tuple[str, str] | None,
    **more: Any,
) -> Dataset:
    """Return a data set of images to train on, to set aside and to test on, which lie and are normalised as `files`
    says; `packed` names two files into which they are decoded once."""
    train, held, test = parts
    inputs, test_inputs = (replace(files, names=tuple(name for name, *_ in rows)) for rows in (train + held, test))
    return Dataset(
        name,
        inputs.pack(packed[0]) if packed else inputs,
        torch.tensor([label for _, label, _ in train + held]),
        test_inputs.pack(packed[1]) if packed else test_inputs,
        torch.tensor([label for _, label, _ in test]),
        classes,
        files.mean,
        files.std,
        validation=np.arange(len(train), len(train + held)) if held else None,
        **more,
    )


def _label_mix(rows: Rows, classes: int) -> FloatArray:
    """Return the share of each class, `(classes,)`."""
    counts = np.bincount([label for _, label, _ in rows], minlength=classes).astype(np.float64)
    mix: FloatArray = counts / max(counts.sum(), 1.0)
    return mix


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

    def part(name: str) -> Rows:
        return source.class_folders([f"{name}/{label}" for label in source.classes], source.facts["each"])

    train, test = part("train"), part("test")
    held = part("valid") if valid != "unused" else []
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
    the sorted WordNet ids, as torchvision's ImageFolder numbers them. Normalised as ImageNet's images are.

    Args:
        packed: Decode once into one file (see `ImageFiles.pack`), 1.2 GB; else batch by batch.
        verify: Check the folders against the published numbers of images.
    """
    source, annotations = Source.of("tiny_imagenet", root, verify), "val/val_annotations.txt"
    facts = source.facts
    ids = sorted(" ".join(source.lines("wnids.txt")).split())
    if verify and len(ids) != facts["number_of_classes"]:
        raise source.damaged("wnids.txt", f"it names {len(ids)} classes, expected {facts['number_of_classes']}")
    train, test = source.class_folders([f"train/{wnid}/images" for wnid in ids], facts["each"]), Rows()
    number = {wnid: index for index, wnid in enumerate(ids)}
    for line, row in enumerate(source.lines(annotations), start=1):
        file, wnid, *_ = [*row.split("\t"), ""]  # and a box
        if wnid not in number:
            raise source.damaged(annotations, f"line {line} names no image and class")
        test.append((f"val/images/{file}", number[wnid], 0))
    source.check_count("val", len(test), facts["test"])
    words = dict(row.split("\t", 1) for row in source.lines("words.txt") if "\t" in row)
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in ids)
    files = ImageFiles(source, (), (64, 64), *IMAGENET)
    return _dataset("tiny_imagenet", files, (train, [], test), classes, ("train", "val") if packed else None)


def pacs(
    root: Path,
    train: tuple[str, ...] = ("sketch", "cartoon"),
    validation_domain: str | None = "art_painting",
    test: str = "photo",
    leave_out: tuple[str, ...] = (),
    kfold: bool = False,
    size: Count = 224,
    packed: bool = False,
    verify: bool = True,
) -> Dataset:
    """Read PACS: 9,991 images of seven classes from four domains: art_painting, cartoon, photo, sketch.

    Li, Yang, Song, Hospedales, "Deeper, Broader and Artier Domain Generalization", ICCV 2017. From
    `PACS/DOMAIN/CLASS/`. The label mix of the test part is the target. Images are normalised as ImageNet's are.

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
    trained, held = _domains(source, train, "train" if kfold else None), Rows()
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
        target=_label_mix(tested, len(classes)),
        domains=np.array([domain for *_, domain in trained + held]),
        test_domains=np.array([domain for *_, domain in tested]),
        domain_names=domains,
    )


def _domains(source: Source, domains: Sequence[str], fold: str | None, leave_out: Sequence[str] = ()) -> Rows:
    """Return all images of some domains, or the images that one of the domains' fold files lists."""
    found, numbers = Rows(), source.facts["domains"]
    for domain in domains:
        number = list(numbers).index(domain)
        if fold is None:
            rows = source.class_folders([f"{domain}/{name}" for name in source.classes], source=number)
            source.check_count(domain, len(rows), numbers[domain])
        else:
            rows = _fold(source, f"{domain}_{fold}_kfold.txt", number)
        found += [row for row in rows if source.classes[row[1]] not in leave_out]
    return found


def _fold(source: Source, file: str, domain: int) -> Rows:
    """Read a fold file: a line is a path below the folder and a label from 1."""
    rows = Rows()
    for line, row in enumerate(source.lines(file), start=1):
        name, _, label = row.strip().rpartition(" ")
        if label not in tuple("1234567") or not name:
            raise source.damaged(file, f"line {line} is no image and label from 1 to 7")
        rows.append((name, int(label) - 1, domain))
    return rows


@names_clients
def iwildcam(
    root: Path,
    validation_split: Literal["val", "id_val"] | None = "val",
    test: Literal["test", "id_test"] = "test",
    size: Count = 448,
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
    source = Source.of("iwildcam", root, verify)
    splits, expected_classes = _splits(source), source.facts["number_of_classes"]
    for split, expected in source.facts["splits"].items():
        source.check_count("", len(splits[split]), expected)
    trained, tested = splits["train"], splits[test]
    held = [] if validation_split is None else splits[validation_split]
    if not trained or not tested:
        raise source.damaged(_WILD_TABLE, "it has no row of split train, or none of the test split")
    cameras, owners = np.unique([camera for *_, camera in trained], return_inverse=True)
    classes = max(label for rows in splits.values() for _, label, _ in rows) + 1
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
        clients=np.append(owners, [-1] * len(held)).astype(np.int64),
        client_names=tuple(f"camera {camera}" for camera in cameras.tolist()),
        target=_label_mix(tested, classes),
    )


def _splits(source: Source) -> dict[str, Rows]:
    """Return the images of each split, with their cameras."""
    splits = {split: Rows() for split in source.facts["splits"]}
    for line, row in enumerate(_table(source, _WILD_TABLE), start=2):
        try:
            split, camera, label, file = row["split"], int(row["location_remapped"]), int(row["y"]), row["filename"]
        except (KeyError, TypeError, ValueError):
            columns = "split, location_remapped, y, filename"
            raise source.damaged(_WILD_TABLE, f"line {line} lacks one of {columns}, or holds no number") from None
        if label < 0 or not file:
            raise source.damaged(_WILD_TABLE, f"line {line} has label {label} and file {file!r}")
        splits.setdefault(split, Rows()).append((f"train/{file}", label, camera))
    return splits


def _table(source: Source, name: str) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(source.lines(name)))
    except csv.Error as error:
        raise source.damaged(name, f"it can't be read as CSV ({error})") from None
