"""A user's own samples: numbering classes and clients, a test part, normalisation; arrays in .npz, tables in CSV."""

from __future__ import annotations

import re
import zipfile
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data._dataset import Dataset, names_clients
from fedskew.errors import ArgumentError, DataError, in_one_line
from fedskew.names import warn_of_look_alikes
from fedskew.sheets import Sheet


@dataclass
class RawSamples:
    """One part of a data set as it was read, with names instead of ids."""

    inputs: Tensor
    labels: Sequence[str]
    clients: Sequence[str] | None = None

    def take(self, rows: NDArray[np.int64]) -> RawSamples:
        """Copy some samples."""
        clients = None if self.clients is None else [self.clients[row] for row in rows]
        return RawSamples(self.inputs[torch.from_numpy(rows)], [self.labels[row] for row in rows], clients)


def make(
    name: str,
    train: RawSamples,
    test: RawSamples | None,
    test_share: float,
    rng: np.random.Generator | None,
    classes: Iterable[str] = (),
    clients: Iterable[str] = (),
    numbered: Sequence[str] = (),
    where: object = "",
    **more: Any,
) -> Dataset:
    """Build the data set; inputs but token ids are standardised by channel, in place, as the training part is.

    `classes` and `clients` may have no sample; `numbered` are all classes in the order of their ids, where that is set;
    `where` says in messages where they were read from, and `more` is for the `Dataset` as it is.
    """
    if test is None:
        kept, held = hold_out(train.labels, test_share, rng)
        train, test = train.take(kept), train.take(held)
    shapes = [tuple(part.inputs.shape[1:]) for part in (train, test)]
    if shapes[0] != shapes[1]:
        raise DataError(f"{where or name}: training samples are {shapes[0]}, those of the test part {shapes[1]}")
    names = tuple(numbered) or ordered({*classes, *train.labels, *test.labels})
    client_names = ordered({*clients, *(train.clients or ())})
    warn_of_look_alikes(names, "classes", f"data {name!r}")
    warn_of_look_alikes(client_names, "clients", f"data {name!r}")
    mean, std = _standardise(train.inputs, test.inputs) if train.inputs.is_floating_point() else ((), ())
    return Dataset(
        name,
        train.inputs.float() if train.inputs.is_floating_point() else train.inputs,
        torch.from_numpy(_ids(train.labels, names)),
        test.inputs.float() if test.inputs.is_floating_point() else test.inputs,
        torch.from_numpy(_ids(test.labels, names)),
        names,
        mean,
        std,
        clients=None if train.clients is None else _ids(train.clients, client_names),
        client_names=client_names,
        **more,
    )


def hold_out(
    labels: Sequence[str], share: float, rng: np.random.Generator | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw rows to hold out, `share` of every class but never all of it; return the others and these, ascending."""
    if rng is None:
        raise ArgumentError("rng: this data has no test part, so one is drawn; pass a numpy Generator")
    if not 0.0 < share < 1.0:
        raise ArgumentError(f"test_share: must be between 0 and 1, got {share}")
    values = np.asarray(labels)
    held = np.zeros(len(values), dtype=bool)
    for label in ordered(set(labels)):
        rows = np.flatnonzero(values == label)
        size = min(round(share * len(rows)), len(rows) - 1)
        held[rng.permutation(rows)[:size]] = True
    if not held.any():
        raise DataError(
            f"too few samples to hold out a test part of {share:g}; give a test part, or a larger test_share"
        )
    return np.flatnonzero(~held), np.flatnonzero(held)


def as_inputs(array: NDArray[Any], where: str) -> Tensor:
    """Return numbers as floats: features, `(samples, features)`, in double, or images in single precision.

    Images are `(samples, height, width)` or `(samples, channels, height, width)`. Bytes are scaled to [0, 1].
    """
    if array.ndim not in (2, 3, 4) or array.size == 0 or array.dtype.kind not in "fiub":
        raise DataError(
            f"{where} must be numbers, (samples, features), (samples, height, width) or (samples, channels, height, "
            f"width); found {array.dtype} {array.shape}"
        )
    if array.ndim == 4 and array.shape[1] > 4 >= array.shape[3]:
        raise DataError(f"{where} has its channels last; write it as x.transpose(0, 3, 1, 2)")
    inputs = torch.from_numpy(array.astype(np.float64 if array.ndim == 2 else np.float32))
    if not torch.isfinite(inputs).all():
        raise DataError(f"{where} has an empty value, NaN or an infinite one")
    if array.dtype == np.uint8:
        inputs.div_(255)
    return inputs.unsqueeze(1) if array.ndim == 3 else inputs


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Sort names: by value if all are whole numbers, else alphabetically."""
    names = set(names)
    if all(re.fullmatch(r"-?\d+", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _ids(values: Sequence[str], names: tuple[str, ...]) -> NDArray[np.int64]:
    number = {name: index for index, name in enumerate(names)}
    return np.array([number[value] for value in values], dtype=np.int64)


def _standardise(train: Tensor, test: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Standardise in place by channel (dimension 1); a channel that never varies is only centred."""
    others = [dimension for dimension in range(train.dim()) if dimension != 1]
    std, mean = torch.std_mean(train, dim=others, correction=0, keepdim=True)
    rounding = 10 * torch.finfo(train.dtype).eps * mean.abs()
    std = torch.where(std > rounding, std, torch.ones_like(std))
    for inputs in (train, test):
        inputs.sub_(mean).div_(std)
    return tuple(mean.flatten().tolist()), tuple(std.flatten().tolist())


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
