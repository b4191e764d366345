"""Samples of sites that are rehearsed on one machine: a data set's rows as CSV files, as sites would have them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import findings
from fedskew.data import Dataset, Inputs, Profile, TableSchema, Texts, in_own_units
from fedskew.deploy._folder import renamed_folders, write_images
from fedskew.errors import ConfigError, DataWarning
from fedskew.files import write_text
from fedskew.tables import csv_text

TRAIN, TEST = "data.csv", "test.csv"
NONE = "no finding"


def write_samples(
    dataset: Dataset, shares: Sequence[NDArray[np.int64]], sites: Sequence[Path], separator: str | None = None
) -> None:
    """Write each site's samples to its folder: a table as `data.csv` and `test.csv`, texts or pictures in folders.

    Numbers have seven digits, as a network has them, and texts the words that it is given; a DataWarning says of how
    many these come back as others. `separator` stands between several labels in one cell. For `shares`, and the test
    part, see `write_images`. Raises ConfigError where the samples are none of these, or there are fewer test samples of
    a table than sites.
    """
    schema: Any = dataset.encoder
    if isinstance(schema, Texts):
        other = 0
        for place, (rows, site) in enumerate(zip(shares, sites, strict=True)):
            dealt = np.arange(place, len(dataset.test_targets), len(sites))
            tested = dataset.test_inputs, dataset.test_targets, dealt
            other += _write_texts(dataset, schema, dataset.inputs, dataset.targets, rows, site / "texts" / "train")
            other += _write_texts(dataset, schema, *tested, site / "texts" / "test")
        if other:
            said = f"{other:,} texts of the sites have other numbers than those of {dataset.name}, by their tokeniser"
            warnings.warn(said, DataWarning, stacklevel=2)
        return
    if not isinstance(schema, TableSchema):
        write_images(dataset, shares, [site / "images" for site in sites])
        return
    if len(dataset.test_targets) < len(sites):
        raise ConfigError(
            f"data.test_share: {len(dataset.test_targets)} test samples can't be divided among {len(sites)} sites; "
            "set a larger share, or give fewer sites (--sites)"
        )
    for place, (rows, folder) in enumerate(zip(shares, sites, strict=True)):
        dealt = np.arange(place, len(dataset.test_targets), len(sites))
        parts = {
            TRAIN: (dataset.inputs, dataset.targets, rows),
            TEST: (dataset.test_inputs, dataset.test_targets, dealt),
        }
        for name, part in parts.items():
            write_text(folder / name, csv_text(_lines(dataset, schema, separator, *part)), private=True)


def _write_texts(
    dataset: Dataset, encoder: Texts, inputs: Inputs, targets: Tensor, rows: NDArray[np.int64], folder: Path
) -> int:
    """Write each text into its class's folder; return how many would be read as other numbers."""
    classes = {name: place for place, name in renamed_folders(dataset.classes).items()}
    ids = inputs.index_select(0, torch.from_numpy(np.asarray(rows)))
    texts = encoder.decode(ids)
    for name in dataset.classes:
        (folder / classes.get(name, name)).mkdir(parents=True, exist_ok=True)
    for row, text in zip(rows.tolist(), texts, strict=True):
        name = dataset.classes[int(targets[row])]
        write_text(folder / classes.get(name, name) / f"{row:06d}.txt", text, private=True)
    return int((encoder.encode(texts) != ids).any(1).sum()) if texts else 0


def _lines(
    dataset: Dataset,
    schema: TableSchema,
    separator: str | None,
    inputs: Inputs,
    targets: Tensor,
    rows: NDArray[np.int64],
) -> list[list[Any]]:
    chosen = torch.from_numpy(np.asarray(rows))
    columns = Profile.columns(in_own_units(inputs.index_select(0, chosen), dataset.mean, dataset.std), schema)
    cells = {name: _cells(schema, name, values) for name, values in columns.items()}
    each = zip(*cells.values(), *_labels(dataset, targets[chosen], separator), strict=True)
    return [[*cells, *schema.labelled], *map(list, each)]


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
