"""A user's own samples: numbering classes and clients, a test part, normalisation; arrays in .npz, tables in CSV."""

import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew import findings
from fedskew.data._dataset import Dataset, IntArray, Moments, names_clients
from fedskew.data._labels import Label, Missing, Place, by_number, of_table, prepared, strata
from fedskew.data._propose import identifiers
from fedskew.data._schema import Column, Encoder, Kind, TableSchema
from fedskew.data._table import Table, place_among, table_files
from fedskew.errors import ArgumentError, DataError, DataWarning, in_one_line, nearest, placed
from fedskew.names import warn_of_look_alikes
from fedskew.sheets import columns_in

Array = np.ndarray[Any, Any]
_NAMED = 40  # columns that a message names


@dataclass
class RawSamples:
    """One part of a data set as it was read, with names instead of ids."""

    inputs: Tensor
    labels: Sequence[Label]
    clients: Sequence[str] | None = None
    place: Place = by_number

    def take(self, rows: IntArray) -> "RawSamples":
        """Copy some samples."""
        clients = None if self.clients is None else [self.clients[row] for row in rows]
        return RawSamples(self.inputs[torch.from_numpy(rows)], [self.labels[row] for row in rows], clients)

    def labelled(self, rows: IntArray, labels: Sequence[Label]) -> "RawSamples":
        """Return these samples, all or some, with other labels."""
        return replace(self if len(rows) == len(self.labels) else self.take(rows), labels=labels)


def make(
    name: str,
    train: RawSamples,
    test: RawSamples | None,
    test_share: float,
    rng: np.random.Generator | None,
    numbered: Sequence[str] = (),
    where: object = "",
    missing: Missing | None = None,
    **more: Any,
) -> Dataset:
    """Build the data set; inputs but token ids are standardised by channel, in place, as the training part is.
    `numbered` are all classes by id, where that is set; `where` says in messages where they were read from, `missing`
    what becomes of samples without a label. `more` is for `assembled`."""
    parts = [train] if test is None else [train, test]
    found = prepared(where or name, [part.labels for part in parts], missing, numbered, [part.place for part in parts])
    train, *others = (part.labelled(*own) for part, own in zip(parts, found, strict=True))
    if test is None:
        kept, held = hold_out(train.labels, test_share, rng)
        train, others = train.take(kept), [train.take(held)]
    return assembled(name, train, others[0], numbered=numbered, where=where, **more)


def assembled(
    name: str,
    train: RawSamples,
    test: RawSamples,
    classes: Iterable[str] = (),
    clients: Iterable[str] = (),
    numbered: Sequence[str] = (),
    where: object = "",
    encoder: Encoder | None = None,
    **more: Any,
) -> Dataset:
    """Build the data set of two parts whose labels are prepared (see `make`); `classes` and `clients` may have no
    sample. Of a table, whose schema is `encoder`, numbers are standardised; `more` is for the `Dataset`."""
    shapes = [tuple(part.inputs.shape[1:]) for part in (train, test)]
    if shapes[0] != shapes[1]:
        raise DataError(f"{where or name}: training samples are {shapes[0]}, those of the test part {shapes[1]}")
    several = isinstance(train.labels[0], tuple)
    each = [label if isinstance(label, tuple) else (label,) for label in (*train.labels, *test.labels)]
    names = tuple(numbered) or ordered({*classes, *chain(*each)})
    if (odd := next((one for one in dict.fromkeys(chain(*each)) if one not in names), None)) is not None:
        raise DataError(f"{where or name}: the label {odd!r} is none of the classes{nearest(odd, names)}")
    if several and not 2 <= len(names) <= findings.MOST:
        raise DataError(f"{where or name}: a sample may have several of 2 to {findings.MOST} labels, not {len(names)}")
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
        multi_label=several,
        **more,
    )


def hold_out(labels: Sequence[Label], share: float, rng: np.random.Generator | None) -> tuple[IntArray, IntArray]:
    """Draw rows to hold out, `share` of every class but never all of it; return the others and these, ascending."""
    if rng is None:
        raise ArgumentError("rng: this data has no test part, so one is drawn; pass a numpy Generator")
    if not 0.0 < share < 1.0:
        raise ArgumentError(f"test_share: must be between 0 and 1, got {share}")
    values = np.asarray(strata(labels))
    held = np.zeros(len(values), dtype=bool)
    for label in ordered(set(values.tolist())):
        rows = np.flatnonzero(values == label)
        size = min(round(share * len(rows)), len(rows) - 1)
        held[rng.permutation(rows)[:size]] = True
    if not held.any():
        raise DataError(f"too few samples to hold out a test part of {share:g}; give one, or a larger test_share")
    return np.flatnonzero(~held), np.flatnonzero(held)


def as_inputs(array: NDArray[Any], where: str) -> Tensor:
    """Return numbers as floats: features, `(samples, features)`, in double, or images in single precision, grey or with
    channels in dimension 1, bytes scaled to [0, 1]."""
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


def _ids(values: Sequence[Label], names: tuple[str, ...]) -> IntArray:
    """Return ids of names; of several names their bits, see `Dataset.multi_label`."""
    number = {name: index for index, name in enumerate(names)}
    found = [number[value] if isinstance(value, str) else sum(1 << number[name] for name in value) for value in values]
    return np.array(found, dtype=np.int64)


def _standardise(train: Tensor, test: Tensor, schema: TableSchema | None) -> Moments:
    """Standardise in place by channel (dimension 1); one that never varies is only centred. Of a table these are its
    numbers, by mean and deviation of those that are there; others become the mean."""
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


@names_clients
def csv(
    root: Path,
    rng: np.random.Generator | None,
    label: str | tuple[str, ...] | None = None,
    separator: str | None = None,
    client: str | None = None,
    test: str | None = None,
    test_share: float = 0.2,
    schema: str | dict[str, Any] | None = None,
    decimal: Literal[".", ","] | None = None,
    missing_labels: Missing = "refuse",
) -> Dataset:
    """Read a user's own table from CSV or Parquet files, one sample a row; columns are found by name, in any order.

    CSV has a header line, columns apart by commas, semicolons or tabs, and is in UTF-8. Of several files (a folder, or
    a pattern such as sites/*.csv) each is a client's, called as the file. Numbers are standardised with mean and
    deviation of the training part. Without a schema columns other than labels and clients hold numbers, none missing.

    Args:
        label: Column of labels, any text, "label" by default; or several of 0 and 1: a list, or their names by commas.
        separator: Sign between the labels in a cell, where a sample may have several, or none.
        client: Column of clients; a column called "client" by default, if there is one.
        test: Name of a file beside it with the same columns, the test part.
        test_share: Share of every class to hold out if there is no test file.
        schema: What the columns hold, labels and clients too: a file that `fedskew schema` proposes, or its tables.
        decimal: The decimal sign of numbers in CSV files; without it: as each file shows.
        missing_labels: "drop" leaves out samples without a label.
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
    if separator is not None and sum(column.kind == "label" for column in own.columns.values()) > 1:
        raise ArgumentError("separator: is for one column of labels, and these are several, of 0 and 1; leave it out")
    odd = identifiers(tables, own.inputs) if schema is None else []
    if odd:
        said = f"{'; '.join(odd)}: the model learns from it all the same; a schema leaves it out: fedskew schema {root}"
        warnings.warn(f"{root}: {said}", DataWarning, stacklevel=2)
    try:
        parts = [_of_table(table, own, separator) for table in tables]
        held = None if aside is None else _of_table(Table.read(aside, decimal), own, separator)
    except DataError as error:
        if schema is not None:
            raise
        raise DataError(f"{error}; a schema says what else columns may hold: fedskew schema {root}") from None
    for path, part in zip(files, parts, strict=True):
        if part.clients is None and files != [root]:
            part.clients = [path.stem] * len(part.labels)
    owners = [part.clients for part in parts if part.clients is not None]
    train = RawSamples(
        torch.cat([part.inputs for part in parts]),
        list(chain(*(part.labels for part in parts))),
        list(chain(*owners)) if len(owners) == len(parts) else None,
        partial(place_among, tables),
    )
    samples = train, held, test_share, rng
    return make("csv", *samples, numbered=own.classes, where=root, encoder=own, missing=missing_labels)


def _of_table(table: Table, schema: TableSchema, separator: str | None) -> RawSamples:
    labels, clients = schema.labels_in(table, separator), schema.clients_in(table)
    return RawSamples(schema.encoded(table), labels, clients, partial(place_among, [table]))


def _schema_of(given: str | dict[str, Any]) -> TableSchema:
    if isinstance(given, str):
        return TableSchema.read_toml(Path(given).expanduser())
    with placed("schema.", ArgumentError, of=(ArgumentError, TypeError)):
        return TableSchema.of_plain(given)


def _all_numbers(table: Table, label: str | tuple[str, ...], client: str | None) -> TableSchema:
    """Return the schema of a table of which nothing is said but its columns of labels and clients."""
    names = list(table.columns)
    labels = columns_in(label, names) if isinstance(label, str) else label
    for option, name in (*(("label", name) for name in labels), ("client", client)):
        if name is not None and name not in names:
            columns = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            table.fail(f"no column {name!r}; set data.{option} to the column of {option}s (columns: {columns})")
    kinds: dict[str, Kind] = {client or "client": "client", **dict.fromkeys(labels, "label")}
    if not set(names) - set(kinds):
        table.fail("no column is left for features")
    return TableSchema({name: Column(kinds.get(name, "number")) for name in names})


@names_clients
def npz(
    root: Path, rng: np.random.Generator | None, test_share: float = 0.2, missing_labels: Missing = "refuse"
) -> Dataset:
    """Read a user's own arrays from an .npz file.

    The arrays are `x` and `y`, optionally `client`, and `x_test` and `y_test` for a test part. `x` holds numbers:
    features, `(samples, features)`, or images, `(samples, height, width)` or `(samples, channels, height, width)`;
    uint8 is scaled from 0 to 255 to [0, 1], and other images should be in [0, 1], as augmentation expects. `y` and
    `client` hold whole numbers or text, `(samples,)`; where a sample may have several labels, `y` holds 0 and 1 for
    each, `(samples, classes)`, and an array `classes` may name them. Inputs are standardised by channel or feature with
    mean and deviation of the training part.

    Args:
        test_share: Share of every class to hold out if there is no test part.
        missing_labels: "drop" leaves out samples without a label.
    """
    arrays = read_arrays(root)
    for name in ("x", "y"):
        if name not in arrays:
            raise DataError(f"{root}: has no array {name!r} (found: {', '.join(sorted(arrays)) or 'none'})")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{root}: has only one of 'x_test' and 'y_test'; a test part needs both")
    y, y_test = arrays["y"], arrays.get("y_test", arrays["y"])
    if y.shape[1:] != y_test.shape[1:]:
        raise DataError(f"{root}: 'y_test' is {y_test.shape} and 'y' {y.shape}; all samples need as many labels")
    train = _of_arrays(root, arrays, "x", "y", "client")
    test = _of_arrays(root, arrays, "x_test", "y_test", None) if "x_test" in arrays else None
    numbered = findings_in(root, arrays) if y.ndim == 2 else ()
    return make("npz", train, test, test_share, rng, numbered=numbered, where=root, missing=missing_labels)


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
        reason = error if isinstance(error, OSError | ValueError | zipfile.BadZipFile) else in_one_line(error)
        if not zipfile.is_zipfile(path):
            reason = getattr(error, "strerror", None) or "it is none, or only a part of one"
        elif "pickle" in str(reason):
            reason = "an array is of Python objects, or something stands before the archive"
        raise DataError(f"{path}: can't be read as an .npz file of plain arrays: {reason}") from None


def _of_arrays(path: Path, arrays: dict[str, Array], x: str, y: str, client: str | None) -> RawSamples:
    inputs = as_inputs(arrays[x], f"{path}: {x!r}")
    clients = names_in(path, client, arrays[client], len(inputs)) if client in arrays and client else None
    return RawSamples(inputs, labels_in(path, y, arrays, len(inputs)), clients)


def labels_in(path: Path, y: str, arrays: dict[str, Array], samples: int) -> Sequence[Label]:
    """Return labels as names, or of each sample those of its columns of 0 and 1."""
    array = arrays[y]
    if array.ndim == 2 and len(array) == samples and array.dtype.kind in "iubf" and array.shape[1] > 1:
        return of_table(f"{path}: {y!r}", findings_in(path, arrays), array.tolist())
    return names_in(path, y, array, samples)


def findings_in(path: Path, arrays: dict[str, Array]) -> tuple[str, ...]:
    """Return the names of the columns of 0 and 1 in `y`: those of the array `classes`, else their numbers."""
    columns = arrays["y"].shape[1]
    names = tuple(names_in(path, "classes", arrays["classes"], columns)) if "classes" in arrays else ()
    return names or tuple(map(str, range(columns)))


def names_in(path: Path, name: str, array: Array, samples: int) -> list[str]:
    """Return labels or clients as names."""
    if array.ndim > 2 and name.startswith("y"):
        raise DataError(
            f"{path}: {name!r} has a label for each pixel, {array.shape}; segmentation is not what fedskew does: give "
            "one class a sample"
        )
    if array.shape != (samples,) or array.dtype.kind not in ("iubfU" if name.startswith("y") else "iubU"):
        raise DataError(
            f"{path}: {name!r} must be whole numbers or text, ({samples},); found {array.dtype} {array.shape}"
        )
    return [str(value) for value in array.tolist()]
