"""A user's own samples in one file: a table of features in CSV, or arrays in .npz."""

from __future__ import annotations

import zipfile
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._own import RawSamples, as_inputs, make
from fedskew.errors import DataError, in_one_line
from fedskew.sheets import Sheet

Array = np.ndarray[Any, Any]

_NAMED = 40  # columns that a message names


@names_clients
def csv(
    root: Path,
    rng: np.random.Generator | None,
    label: str = "label",
    client: str | None = None,
    test: str | None = None,
    test_share: float = 0.2,
) -> Dataset:
    """Read a user's own table of features from a CSV file.

    A header line, then one sample a line; columns apart by commas, semicolons or tabs, UTF-8. Columns other than labels
    and clients must hold numbers, with a decimal point. Features are standardised with mean and deviation of the
    training part.

    Args:
        label: Column of labels, any text.
        client: Column of clients; a column called "client" by default, if there is one.
        test: Name of a file beside it with the same columns, the test part.
        test_share: Share of every class to hold out if there is no test file.
    """
    train, header = _of_table(root, label, client)
    held = None
    if test is not None:
        path = root.parent / test
        held, columns = _of_table(path, label, client)
        if columns != header:
            raise DataError(f"{path}, line 1: its columns are not those of {root}")
    return make("csv", train, held, test_share, rng)


def _of_table(path: Path, label: str, client: str | None) -> tuple[RawSamples, list[str]]:
    """Return the samples of one file, and its header."""
    sheet = Sheet(path, "a header line, then one sample a line", error=DataError)
    sheet.check_header(unnamed=True)
    header = sheet.header
    for option, name in (("label", label), ("client", client)):
        if name is not None and name not in header:
            columns = ", ".join(header[:_NAMED]) + (", ..." if len(header) > _NAMED else "")
            sheet.fail(
                sheet.line, f"no column {name!r}; set data.{option} to the column of {option}s (columns: {columns})"
            )
    if client is None and "client" in header and label != "client":
        client = "client"
    features = [column for column, name in enumerate(header) if name not in (label, client)]
    if not features:
        sheet.fail(sheet.line, "no column is left for features")
    labels = sheet.texts(header.index(label), "class")
    clients = None if client is None else sheet.texts(header.index(client), "client")
    values = array("d")
    for line, cells in sheet:
        for column in features:
            try:
                values.append(float(cells[column]))
            except ValueError:
                wrong = "not a number; only the columns of labels and clients (options label, client) may hold text"
                sheet.fail(line, f"{cells[column]!r} is {wrong}", header[column])
    table = np.frombuffer(values).reshape(len(labels), len(features))
    if not np.isfinite(table).all():
        row, column = np.argwhere(~np.isfinite(table))[0]
        sheet.fail_row(row, f"{table[row, column]} is not a finite number", header[features[column]])
    return RawSamples(torch.from_numpy(table.copy()), labels, clients), header


@names_clients
def npz(root: Path, rng: np.random.Generator | None, test_share: float = 0.2) -> Dataset:
    """Read a user's own arrays from an .npz file.

    The arrays are `x` and `y`, optionally `client`, and `x_test` and `y_test` for a test part. `x` holds numbers:
    features, `(samples, features)`, or images, `(samples, height, width)` or `(samples, channels, height, width)`;
    uint8 is scaled from 0 to 255 to [0, 1], and other images should be in [0, 1], as augmentation expects. `y` and
    `client` hold whole numbers or text, `(samples,)`. Inputs are standardised by channel or feature with mean and
    deviation of the training part.

    Args:
        test_share: Share of every class to hold out if there is no test part.
    """
    arrays = read_arrays(root)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{root}: has no array {name!r} (found: {', '.join(sorted(arrays)) or 'none'})")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{root}: has only one of 'x_test' and 'y_test'; a test part needs both")
    train = _of_arrays(root, arrays, "x", "y", "client")
    test = _of_arrays(root, arrays, "x_test", "y_test", None) if "x_test" in arrays else None
    return make("npz", train, test, test_share, rng, where=root)


def read_inputs(path: Path) -> Tensor:
    """Return the array `x` of a file as `npz` reads it, before it is standardised."""
    arrays = read_arrays(path, ["x"])
    if "x" not in arrays:
        raise DataError(f"{path}: has no array 'x'")
    return as_inputs(arrays["x"], f"{path}: 'x'")


def read_arrays(path: Path, names: Collection[str] | None = None) -> dict[str, Array]:
    """Read the arrays of an .npz file; of those with other names than `names`, nothing is read."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files if names is None or name in names}
    except Exception as error:  # a damaged file, or one whose header promises terabytes, can raise almost anything
        known = isinstance(error, OSError | EOFError | ValueError | AttributeError | TypeError | zipfile.BadZipFile)
        reason = getattr(error, "strerror", None) or (error if known else in_one_line(error))
        raise DataError(f"{path}: can't be read as an .npz file of plain arrays: {reason}") from None


def _of_arrays(path: Path, arrays: dict[str, Array], x: str, y: str, client: str | None) -> RawSamples:
    inputs = as_inputs(arrays[x], f"{path}: {x!r}")
    clients = names_in(path, client, arrays[client], len(inputs)) if client in arrays and client else None
    return RawSamples(inputs, names_in(path, y, arrays[y], len(inputs)), clients)


def names_in(path: Path, name: str, array: Array, samples: int) -> list[str]:
    """Return labels or clients as names."""
    if array.shape != (samples,) or array.dtype.kind not in "iubU":
        raise DataError(
            f"{path}: {name!r} must be whole numbers or text, ({samples},); found {array.dtype} {array.shape}"
        )
    return [str(value) for value in array.tolist()]
