"""A user's own data in an object of Hugging Face's package `datasets`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._images import Picture, Size, opened, read_pictures
from fedskew.data._labels import Label, Missing, of_columns, prepared
from fedskew.data._own import RawSamples, as_inputs, assembled, hold_out
from fedskew.data._schema import Column, Encoder, TableSchema
from fedskew.data._table import datasets_package, saved_part, saved_table
from fedskew.data.texts import Texts, Vocabulary
from fedskew.errors import ArgumentError, DataError, nearest, placed
from fedskew.sheets import columns_in

Table = Any
"""A `datasets.Dataset`."""


_NUMBERS = ("int", "uint", "float", "bool", "double")


@names_clients
def from_huggingface(
    root: Any,
    *,
    inputs: str | None = None,
    label: str | tuple[str, ...] = "label",
    separator: str | None = None,
    client: str | None = None,
    test: str = "test",
    test_share: float = 0.2,
    size: Size = None,
    vocabulary_size: int = 98_635,
    length: int = 200,
    window: tuple[float, ...] = (),
    skip_broken: bool = False,
    missing_labels: Missing = "refuse",
    rng: np.random.Generator | None = None,
    encoder: Encoder | None = None,
) -> Dataset:
    """Convert a table of Hugging Face's `datasets`, all of it in memory.

    Images are grey if all are, else RGB. Arrays are `(features,)`, `(height, width)` or `(channels, height, width)`;
    uint8 is scaled to [0, 1]. Images, arrays and numbers are standardised by channel or feature with mean and deviation
    of the training part. Text becomes token ids, `(samples, length)`, by a vocabulary of the training text, as for
    `ag_news`. Classes keep the ids of a `ClassLabel`.

    Args:
        root: A `datasets.Dataset`, or a `DatasetDict` whose parts are "train" and, optionally, `test`; or a folder that
            `save_to_disk` wrote.
        inputs: Column to learn from: images, text, an array, or a number. By default the only column of images, else
            the only one of text, else the only one of arrays, else all columns of numbers together.
        label: Column of labels, a list of several where a sample may have these; or columns of 0 and 1, as for `csv`.
        separator: Sign between the labels of a sample in one column of text, of which it may have several.
        client: Column of natural clients; a column called "client" by default, if there is one.
        test: Name of the test part.
        test_share: Share of every class to hold out if there is no test part.
        size: Side, or (height, width), to which images are resized (bilinear); by default all must have one size.
        vocabulary_size: Number of token ids, for text.
        length: Number of words kept of each text.
        window: The values that are black and white in grey images of more than 8 bits, as for `folder`.
        skip_broken: Leave out images that can't be read, and say which; else they are refused, all in one list.
        missing_labels: "drop" leaves out samples without a label.
        encoder: A federation's words, in place of those of the training part, or its columns.
    """
    package = datasets_package()
    table = saved_table(root) if isinstance(root, Path) else root
    parts = dict(table) if isinstance(table, package.DatasetDict) else {"train": table}
    if "train" not in parts:
        raise DataError(f"table: has no part 'train' (found: {', '.join(parts)})")
    for name, part in parts.items():
        if not isinstance(part, package.Dataset):
            raise DataError(f"table: {name} is of type {type(part).__name__}; expected datasets.Dataset, not streamed")
    train = parts["train"].with_format(None)
    named = columns_in(label, train.column_names) if isinstance(label, str) else tuple(label)
    columns = _columns(train, named, client, inputs)
    if client is None and "client" in train.column_names and "client" not in (*named, inputs):
        client = "client"
    held = None
    if test in parts:
        held = parts[test].with_format(None)
        if absent := {*columns, *named} - set(held.column_names):
            raise DataError(f"table: its part {test!r} has no column {sorted(absent)[0]!r}")
    numbered = class_names(train, named[0]) if len(named) == 1 else named
    used = [labels_of(part, named, separator) for part in (train, held) if part is not None]
    (rows, labels), *rest = prepared("table", used, missing_labels, numbered)
    if rest:
        ((held_rows, held_labels),) = rest
    else:
        kept, out = hold_out(labels, test_share, rng)
        rows, held_rows = rows[kept], rows[out]
        labels, held_labels = ([labels[row] for row in own] for own in (kept, out))
    train, held = train.select(rows), (train if held is None else held).select(held_rows)
    more: dict[str, Any] = {}
    kind = _kind(train.features[columns[0]])
    if kind == "image":
        read = read_pictures([pictures_in(part, columns[0]) for part in (train, held)], size, window, skip_broken)
        train, held = (part.select(kept) for part, kept in zip((train, held), read.kept, strict=True))
        parts_of = zip((labels, held_labels), read.kept, strict=True)
        labels, held_labels = ([own[row] for row in kept] for own, kept in parts_of)
        (values, held_values), more["window"], more["skipped"] = read.parts, read.window, read.broken
    elif kind == "text":
        texts, held_texts = ([value or "" for value in part[columns[0]]] for part in (train, held))
        own = Vocabulary.of(texts, vocabulary_size, length, columns[0])
        own = encoder if isinstance(encoder, Texts) else own
        values, held_values = own.encode(texts, "table"), own.encode(held_texts, "table: its test part")
        more["encoder"] = own
    else:
        if isinstance(encoder, TableSchema):
            columns = [*encoder.inputs]
            if absent := {*columns} - {*train.column_names}:
                raise DataError(f"table: has no column {min(absent)!r}, which the federation has")
        values, held_values = (_numbers(part, columns) for part in (train, held))
        if kind == "number":
            more["encoder"] = TableSchema(
                {
                    name: Column("label" if name in named else "number" if name in columns else "ignored")
                    for name in (*columns, *(name for name in train.column_names if name not in columns))
                }
            )
    clients = None if client is None else names_of(train, client)
    samples = RawSamples(values, labels, clients), RawSamples(held_values, held_labels)
    return assembled("huggingface", *samples, numbered=numbered, where="table", **more)


def labels_of(table: Table, labels: Sequence[str], separator: str | None) -> Sequence[Label]:
    """Return the labels of a part; where there is none, an empty one."""
    inner = getattr(table.features[labels[0]], "feature", None) if len(labels) == 1 else None
    if inner is None:
        return of_columns("table", labels, lambda name: names_of(table, name, ""), separator)
    name = getattr(inner, "int2str", str)
    return ["" if found is None else tuple(dict.fromkeys(map(name, found))) for found in table[labels[0]]]


def class_names(table: Table, label: str) -> list[str]:
    """Return the names of the classes in the order of their ids, where the column has such; refuse what is no label."""
    feature = table.features[label]
    feature = getattr(feature, "feature", feature)  # of a list of labels
    if type(feature).__name__ in ("Image", "Array2D", "Array3D"):
        raise DataError(
            f"table: {label!r} has a label for each pixel; segmentation is not what fedskew does: give one a sample"
        )
    return list(getattr(feature, "names", None) or [])


def saved_samples(path: Path) -> list[Picture] | Tensor:
    """Return the images of a saved table, which are decoded when they are opened; where there are none, its arrays."""
    table = saved_part(path)
    kinds = {name: _kind(feature) for name, feature in table.features.items()}
    for kind in ("image", "array"):
        found = [name for name in kinds if kinds[name] == kind]
        if len(found) > 1:
            raise DataError(
                f"{path}: holds {len(found)} columns of {kind}s, and one is expected; keep one: select_columns"
            )
        if found:
            return pictures_in(table, found[0], path) if kind == "image" else _numbers(table, found)
    raise DataError(f"{path}: holds no column of images or arrays (found: {', '.join(kinds)})")


def _kind(feature: Any) -> str:
    """Return what a column holds: "image", "text", "number", "array" or "other"."""
    kind = type(feature).__name__
    if kind == "Image":
        return "image"
    if kind == "Value":
        return "text" if "string" in feature.dtype else "number" if feature.dtype.startswith(_NUMBERS) else "other"
    return "array" if kind in ("Sequence", "List", "LargeList", "Array2D", "Array3D", "list") else "other"


def _columns(table: Table, label: Sequence[str], client: str | None, inputs: str | None) -> list[str]:
    names = table.column_names
    for option, name in (*(("label", name) for name in label), ("client", client), ("inputs", inputs)):
        if name is not None and name not in names:
            raise ArgumentError(f"{option}: the table has no column {name!r}{nearest(name, names)}")
    kinds = {name: _kind(table.features[name]) for name in names if name not in (*label, client, "client")}
    if inputs is not None:
        if _kind(table.features[inputs]) == "other":
            raise ArgumentError(
                f"inputs: column {inputs!r} holds {table.features[inputs]}, which can't be learned from"
            )
        return [inputs]
    for kind in ("image", "text", "array"):
        found = [name for name in kinds if kinds[name] == kind]
        if len(found) == 1:
            return found
        if found:
            raise ArgumentError(f"inputs: say which column to learn from: {', '.join(found)} all hold {kind}s")
    numbers = [name for name in kinds if kinds[name] == "number"]
    if not numbers:
        raise ArgumentError(f"inputs: no column to learn from (found: {', '.join(names)})")
    return numbers


def names_of(table: Table, column: str, empty: str | None = None) -> list[str]:
    """Return the values of a column as names, those of a ClassLabel by its own names; `empty` where there is none."""
    feature, values = table.features[column], list(table[column])
    if None in values and empty is not None:
        values = [empty if value is None else value for value in values]
    elif None in values:
        raise DataError(f"table: {column!r} is empty in row {values.index(None) + 1}")
    if hasattr(feature, "int2str"):
        with placed(f"table: {column!r}: ", DataError, of=ValueError):
            return [value if value == empty else str(feature.int2str(value)) for value in values]
    return [str(value) for value in values]


def pictures_in(table: Table, column: str, place: object = "table") -> list[Picture]:
    """Return the images of a column, which are decoded when they are opened."""
    found: list[Picture] = []
    for row, image in enumerate(table.cast_column(column, datasets_package().Image(decode=False))[column], 1):
        if image is None:
            raise DataError(f"{place}: {column!r} is empty in row {row}")
        where = Path(f"{place}: {column!r} in row {row}")
        found.append((str(where), partial(_opened, where, image)))
    return found


def _opened(where: Path, image: dict[str, Any]) -> AbstractContextManager[Any]:
    return opened(where, image["path"] if image["bytes"] is None else BytesIO(image["bytes"]))


def _numbers(table: Table, columns: Sequence[str]) -> Tensor:
    """Return `(samples, features)`, or `(samples, ..., height, width)`."""
    where = f"table: {', '.join(columns)}"
    try:
        found = [np.asarray(table.with_format("numpy")[column][:]) for column in columns]
        array = np.stack(found, axis=1) if found[0].ndim == 1 else found[0]
        # The column's own type: the numpy format widens bytes.
        of_bytes = array.ndim > 2 and "'uint8'" in str(table.features[columns[0]])
        array = array.astype(np.uint8 if of_bytes else np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not all samples are numbers of one shape ({error})") from None
    return as_inputs(array, where)
