"""A user's own samples: numbering classes and clients, a test part, normalisation; arrays in .npz, tables in CSV."""

from __future__ import annotations

import dataclasses
import re
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._schema import Column, Encoder, Kind, TableSchema
from fedskew.data._table import Table, table_files
from fedskew.errors import ArgumentError, DataError, in_one_line
from fedskew.names import warn_of_look_alikes


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
    encoder: Encoder | None = None,
    **more: Any,
) -> Dataset:
    """Build the data set; inputs but token ids are standardised by channel, in place, as the training part is.

    `classes` and `clients` may have no sample; `numbered` are all classes in the order of their ids, where that is set;
    `where` says in messages where they were read from, and `more` is for the `Dataset` as it is. Of a table, whose
    schema is `encoder`, numbers are standardised.
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
    schema = encoder if isinstance(encoder, TableSchema) else None
    mean, std = _standardise(train.inputs, test.inputs, schema) if train.inputs.is_floating_point() else ((), ())
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
        encoder=encoder,
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


def _standardise(
    train: Tensor, test: Tensor, schema: TableSchema | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Standardise in place by channel (dimension 1); a channel that never varies is only centred.

    Of a table these are its numbers, by mean and deviation of those that are there; others become the mean.
    """
    others = [dimension for dimension in range(train.dim()) if dimension != 1]
    std, mean = torch.std_mean(train, dim=others, correction=0, keepdim=True)
    for column in mean.isnan().flatten().nonzero().flatten().tolist():
        there = train[:, column][~train[:, column].isnan()]
        std[:, column], mean[:, column] = torch.std_mean(there, correction=0) if len(there) else (0.0, 0.0)
    rounding = 10 * torch.finfo(train.dtype).eps * mean.abs()
    std = torch.where(std > rounding, std, torch.ones_like(std))
    if schema is not None:
        mean[:, schema.numbers :], std[:, schema.numbers :] = 0.0, 1.0
    for inputs in (train, test):
        inputs.sub_(mean).div_(std)
        if schema is not None:
            inputs.nan_to_num_(nan=0.0)
    return tuple(mean.flatten().tolist()), tuple(std.flatten().tolist())


Array = np.ndarray[Any, Any]

_NAMED = 40  # columns that a message names


@names_clients
def csv(
    root: Path,
    rng: np.random.Generator | None,
    label: str | None = None,
    client: str | None = None,
    test: str | None = None,
    test_share: float = 0.2,
    schema: str | dict[str, Any] | None = None,
    decimal: Literal[".", ","] | None = None,
) -> Dataset:
    """Read a user's own table from CSV or Parquet files, one sample a row; columns are found by name, in any order.

    CSV has a header line, columns apart by commas, semicolons or tabs, and is in UTF-8. Of several files (a folder, or
    a pattern such as sites/*.csv) each is a client's, called as the file. Numbers are standardised with mean and
    deviation of the training part. Without a schema columns other than labels and clients hold numbers, none missing.

    Args:
        label: Column of labels, any text; "label" by default.
        client: Column of clients; a column called "client" by default, if there is one.
        test: Name of a file beside it with the same columns, the test part.
        test_share: Share of every class to hold out if there is no test file.
        schema: What the columns hold, labels and clients too: a file that `fedskew schema` proposes, or its tables.
        decimal: The decimal sign of numbers in CSV files; without it: as each file shows.
    """
    aside = None if test is None else (root if root.is_dir() else root.parent) / test
    files = table_files(root, aside)
    if not files:
        raise DataError(f"{root}: there is no CSV or Parquet file")
    if schema is not None and (label or client):
        raise ArgumentError(
            f"{'label' if label else 'client'}: the schema says which columns hold labels and clients; leave it out"
        )
    tables = [Table.read(path, decimal) for path in files]
    own = _schema_of(schema) if schema is not None else _all_numbers(tables[0], label or "label", client)
    try:
        parts = [_of_table(table, own) for table in tables]
        held = None if aside is None else _of_table(Table.read(aside, decimal), own)
    except DataError as error:
        if schema is not None:
            raise
        raise DataError(f"{error}; a schema says what else columns may hold: fedskew schema {root}") from None
    for path, part in zip(files, parts, strict=True):
        if part.clients is None and files != [root]:
            part.clients = [path.stem] * len(part.labels)
    if any(part.clients is None for part in parts):
        parts = [dataclasses.replace(part, clients=None) for part in parts]
    train = RawSamples(
        torch.cat([part.inputs for part in parts]),
        [label for part in parts for label in part.labels],
        None if parts[0].clients is None else [name for part in parts for name in part.clients or ()],
    )
    return make("csv", train, held, test_share, rng, numbered=own.classes, where=root, encoder=own)


def _of_table(table: Table, schema: TableSchema) -> RawSamples:
    labels = schema.names_in(table, "label")
    assert labels is not None, "there is such a column, or an error"
    return RawSamples(schema.encoded(table), labels, schema.names_in(table, "client"))


def _schema_of(given: str | dict[str, Any]) -> TableSchema:
    if isinstance(given, str):
        return TableSchema.read_toml(Path(given).expanduser())
    try:
        return TableSchema.of_plain(given)
    except (ArgumentError, TypeError) as error:
        raise ArgumentError(f"schema.{error}") from None


def _all_numbers(table: Table, label: str, client: str | None) -> TableSchema:
    """Return the schema of a table of which nothing is said but its columns of labels and clients."""
    names = list(table.columns)
    for option, name in (("label", label), ("client", client)):
        if name is not None and name not in names:
            columns = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            table.fail(f"no column {name!r}; set data.{option} to the column of {option}s (columns: {columns})")
    kinds: dict[str, Kind] = {client or "client": "client", label: "label"}
    if not set(names) - set(kinds):
        table.fail("no column is left for features")
    return TableSchema({name: Column(kinds.get(name, "number")) for name in names})


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
