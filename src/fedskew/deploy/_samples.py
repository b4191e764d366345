"""Samples of sites that are rehearsed on one machine: a data set's rows in files, as sites would have them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedskew import findings
from fedskew.data import Dataset, Inputs, Profile, TableSchema, Texts, in_own_units
from fedskew.errors import ConfigError, DataWarning
from fedskew.files import write_text
from fedskew.names import SYSTEM_FOLDERS
from fedskew.tables import csv_text

FILES = {"train": "data.csv", "test": "test.csv"}
NONE = "no finding"

FOLDER_NAME = re.compile(r"(?!\.)[^/\\<>:\"|?*]{0,60}[^/\\<>:\"|?*. ]")
"""Names of classes that a folder can have on any system, and that the reader "folder" does not leave out."""

IntArray = NDArray[np.int64]


def write_samples(
    dataset: Dataset, shares: Sequence[IntArray], sites: Sequence[Path], separator: str | None = None
) -> None:
    """Write each site's samples to its folder: a table as `data.csv` and `test.csv`, texts or pictures in folders.

    `shares` are rows of the training part; of the test part of n sites, site k gets samples k, k + n, k + 2n and so on.
    Numbers have seven digits, as a network has them, and texts the words that it is given; a DataWarning says of how
    many these come back as others. `separator` stands between several labels in one cell. Raises ConfigError where the
    samples are none of these, or there are fewer test samples of a table than sites.
    """
    write = _writer(dataset, len(sites), separator)
    other = 0
    for place, (rows, site) in enumerate(zip(shares, sites, strict=True)):
        dealt = np.arange(place, len(dataset.test_targets), len(sites))
        other += write(site, "train", dataset.inputs, dataset.targets, np.asarray(rows))
        other += write(site, "test", dataset.test_inputs, dataset.test_targets, dealt)
    if other:
        said = f"{other:,} texts of the sites have other numbers than those of {dataset.name}, by their tokeniser"
        warnings.warn(said, DataWarning, stacklevel=2)


def _writer(
    dataset: Dataset, sites: int, separator: str | None
) -> Callable[[Path, str, Inputs, Tensor, IntArray], int]:
    """Return what writes a part of a site's samples, and returns how many would be read as others."""
    schema: Any = dataset.encoder
    if isinstance(schema, Texts):
        return partial(_write_texts, dataset, schema)
    if isinstance(schema, TableSchema):
        if len(dataset.test_targets) < sites:
            raise ConfigError(
                f"data.test_share: {len(dataset.test_targets)} test samples can't be divided among {sites} sites; set "
                "a larger share, or give fewer sites (--sites)"
            )
        return partial(_write_table, dataset, schema, separator)
    if len(dataset.in_shape) != 3 or dataset.in_shape[0] not in (1, 3):
        raise ConfigError(
            f"data.name: samples of {dataset.name!r} have shape {dataset.in_shape} and are neither images nor a table "
            "(csv); describe each site's data in its data.toml, as fedskew deploy init lays it out"
        )
    if dataset.multi_label:
        raise ConfigError(
            "data.name: images of several labels can't be told apart by folders; write the federation with fedskew "
            "deploy init, and give each site an .npz file of its own"
        )
    return partial(_write_images, dataset)


def _write_images(dataset: Dataset, site: Path, part: str, inputs: Inputs, targets: Tensor, rows: IntArray) -> int:
    """Write `images/PART/CLASS/ROW.png`."""
    folders = _class_folders(dataset, site / "images" / part)
    for row in rows.tolist():
        sample = in_own_units(inputs.index_select(0, torch.tensor([row])), dataset.mean, dataset.std)[0]
        levels = (sample.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        image = Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
        image.save(folders[int(targets[row])] / f"{row:06d}.png")
    return 0


def _write_texts(
    dataset: Dataset, encoder: Texts, site: Path, part: str, inputs: Inputs, targets: Tensor, rows: IntArray
) -> int:
    """Write `texts/PART/CLASS/ROW.txt`; return how many would be read as other numbers."""
    folders = _class_folders(dataset, site / "texts" / part)
    ids = inputs.index_select(0, torch.from_numpy(rows))
    texts = encoder.decode(ids)
    for row, text in zip(rows.tolist(), texts, strict=True):
        write_text(folders[int(targets[row])] / f"{row:06d}.txt", text, private=True)
    return int((encoder.encode(texts) != ids).any(1).sum()) if texts else 0


def _class_folders(dataset: Dataset, folder: Path) -> list[Path]:
    """Make a folder for each class; return them by class id."""
    renamed = {name: place for place, name in renamed_folders(dataset.classes).items()}
    places = [folder / renamed.get(name, name) for name in dataset.classes]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    return places


def renamed_folders(classes: Sequence[str]) -> dict[str, str]:
    """Name folders for the classes whose names can't be those of folders, as of `Sci/Tech`; return the class of
    each."""
    folders: dict[str, str] = {}
    for label, name in enumerate(classes):
        if not (FOLDER_NAME.fullmatch(name) and name.isprintable()) or name in SYSTEM_FOLDERS:
            folder = f"class-{label}"
            while folder in classes:
                folder += "-"
            folders[folder] = name
    return folders


def _write_table(
    dataset: Dataset,
    schema: TableSchema,
    separator: str | None,
    site: Path,
    part: str,
    inputs: Inputs,
    targets: Tensor,
    rows: IntArray,
) -> int:
    chosen = torch.from_numpy(rows)
    columns = Profile.columns(in_own_units(inputs.index_select(0, chosen), dataset.mean, dataset.std), schema)
    cells = {name: _cells(schema, name, values) for name, values in columns.items()}
    each = zip(*cells.values(), *_labels(dataset, targets[chosen], separator), strict=True)
    lines = [[*cells, *schema.labelled], *map(list, each)]
    write_text(site / FILES[part], csv_text(lines), private=True)
    return 0


def _cells(schema: TableSchema, name: str, values: NDArray[Any]) -> list[str]:
    column = schema.columns[name]
    if column.kind == "category":
        return list(values)
    low, high = column.range or (-np.inf, np.inf)
    there = np.clip(values, low, high)  # single precision may be beyond the end by a digit
    if column.kind == "date":
        return ["" if np.isnan(day) else str(np.datetime64("1970-01-01") + int(np.rint(day))) for day in there]
    return ["" if np.isnan(value) else f"{value:.7g}" for value in there]


def _labels(dataset: Dataset, targets: Tensor, separator: str | None) -> list[list[Any]]:
    """Return the columns of labels: of classes, of 0 and 1 for each label, or of several in each cell."""
    if not dataset.multi_label:
        return [[dataset.classes[label] for label in targets.tolist()]]
    table = findings.as_table(targets.numpy(), dataset.num_classes)
    if separator is None:
        return [list(column) for column in table.T.tolist()]
    named = [[name for name, has in zip(dataset.classes, row, strict=True) if has] for row in table.tolist()]
    return [[separator.join(names) or NONE for names in named]]
