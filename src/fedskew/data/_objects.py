"""Data that are an object of Python: a `Dataset` of ours, a table of Hugging Face's, a map-style one of PyTorch's."""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedskew.data._dataset import Dataset
from fedskew.data._huggingface import from_huggingface
from fedskew.data._images import read_pictures
from fedskew.data._labels import Missing, of_table
from fedskew.data._own import RawSamples, as_inputs, make
from fedskew.errors import DataError, in_one_line

Items = Any
"""A sequence of pairs (input, label), such as a map-style data set of PyTorch's."""


class ObjectData(NamedTuple):
    """An object in place of a data set's name: its name in a config, a digest of its content, and its reader."""

    label: str
    digest: str
    read: Callable[..., Dataset]


def from_object(value: Any, test: Any = None) -> ObjectData:
    """Take an object as the data of a run.

    Args:
        value: A `Dataset` of ours, a `Dataset` or `DatasetDict` of the package `datasets`, or a map-style data set of
            PyTorch (torchvision's too), whose items are `(input, label)`. The last is read once, into memory; images
            and bytes are scaled to [0, 1], and everything but token ids is standardised by channel.
        test: The test part, of the same kind; None: the object's own, or a share of every class (`test_share`).
    """
    if isinstance(value, Dataset):
        if test is not None:
            raise DataError("data.test: a fedskew.data.Dataset has a test part; leave this one out")
        return ObjectData(value.name, _digest(*(getattr(value, field.name) for field in fields(value))), lambda: value)
    if type(value).__module__.partition(".")[0] == "datasets":
        return _table(value, test)
    train, numbered = _read(value, "data")
    held = None if test is None else _read(test, "data.test")[0]
    label = type(value).__name__

    def read(rng: np.random.Generator, test_share: float = 0.2, missing_labels: Missing = "refuse") -> Dataset:
        own = RawSamples(train.inputs.clone(), train.labels)
        test = None if held is None else RawSamples(held.inputs.clone(), held.labels)
        return make(label, own, test, test_share, rng, numbered=numbered, where="data", missing=missing_labels)

    parts = [train.inputs, train.labels, *([] if held is None else [held.inputs, held.labels])]
    return ObjectData(label, _digest(*parts, numbered), read)


def _table(value: Any, test: Any) -> ObjectData:
    """Return a table of Hugging Face's, or a dict of tables."""
    if test is not None and not isinstance(test, str):
        import datasets

        value, test = datasets.DatasetDict({"train": value, "test": test}), None
    tables = dict(value) if isinstance(value, dict) else {"": value}
    prints = [(name, getattr(table, "_fingerprint", None)) for name, table in tables.items()]
    read = partial(from_huggingface, value, **({} if test is None else {"test": test}))
    return ObjectData(type(value).__name__, _digest(*prints, test), read)


def _read(items: Items, where: str) -> tuple[RawSamples, tuple[str, ...]]:
    """Return all items of a map-style data set, and the names of its classes in the order of ids, if it has such."""
    kind = type(items).__name__
    if isinstance(items, DataLoader):
        raise DataError(f"{where}: a DataLoader; give its .dataset, batches are made by training.batch_size")
    if isinstance(items, IterableDataset) or not (hasattr(items, "__getitem__") and hasattr(items, "__len__")):
        raise DataError(
            f"{where}: {kind} has no items by number; give a map-style data set of PyTorch, a table of datasets, a "
            "fedskew.data.Dataset, a function that returns one, or a name"
        )
    if not len(items):
        raise DataError(f"{where}: {kind} has no items")
    with torch.random.fork_rng(devices=[]):  # a transform may draw
        again, _ = _item(items, 0, where)
        values, labels = zip(*(_item(items, at, where) for at in range(len(items))), strict=True)
    if not np.array_equal(np.asarray(values[0]), np.asarray(again)):
        raise DataError(
            f"{where}: an item of {kind} differs each time that it is read, so its transform draws at random; "
            "leave that out, and set training.augmentation"
        )
    shapes = [value.size[::-1] if isinstance(value, Image.Image) else value.shape for value in values]
    if odd := [at for at, shape in enumerate(shapes) if shape != shapes[0]]:
        raise DataError(f"{where}: item {odd[0]} is {shapes[odd[0]]}, item 0 is {shapes[0]}; resize them to one shape")
    if isinstance(again, Image.Image):
        pictures = [(f"{where}: item {at}", partial(nullcontext, value)) for at, value in enumerate(values)]
        (inputs,) = read_pictures([pictures], None).parts
    elif again.ndim == 1 and again.dtype in (np.int32, np.int64):
        inputs = torch.from_numpy(np.stack(values).astype(np.int64))  # token ids
    else:
        inputs = as_inputs(np.stack(values), f"{where}: {kind}").float()
    classes = _class_names(items)
    if getattr(labels[0], "ndim", 0) == 1:  # 0 and 1 for each class, of which an item may have several
        classes = classes if len(classes) == len(labels[0]) else tuple(map(str, range(len(labels[0]))))
        return RawSamples(inputs, of_table(where, classes, [np.asarray(label).tolist() for label in labels])), classes
    return RawSamples(inputs, _names(labels, classes)), classes


def _item(items: Items, at: int, where: str) -> tuple[Any, Any]:
    """Return the input of an item, an image or an array, and its label."""
    try:
        item = items[at]
    except Exception as error:
        raise DataError(f"{where}: item {at} can't be read: {in_one_line(error)}") from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"{where}: item {at} is of type {type(item).__name__}; expected (input, label)")
    value, label = item
    if isinstance(value, Image.Image):
        return value, label
    try:
        return torch.as_tensor(value).numpy(force=True), label
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where}: the input of item {at} is of type {type(value).__name__}, not numbers") from None


def _class_names(items: Items) -> tuple[str, ...]:
    """Return the names of the classes in the order of their ids, where the data set says so as torchvision's do."""
    names = getattr(items, "classes", None) or getattr(getattr(items, "dataset", None), "classes", None) or ()
    found = tuple(map(str, names)) if isinstance(names, Sequence) else ()
    return found if len(set(found)) == len(found) else ()


def _names(labels: Sequence[Any], classes: tuple[str, ...]) -> list[str]:
    plain = [label.item() if isinstance(label, Tensor | np.generic) and label.ndim == 0 else label for label in labels]
    for at, label in enumerate(plain):
        if isinstance(label, Image.Image) or getattr(label, "ndim", 0) > 1:
            raise DataError(
                f"data: item {at} has a label for each pixel; segmentation is not what fedskew does: give one an item"
            )
        if not isinstance(label, int | str | float | None) or (classes and not isinstance(label, int | str)):
            raise DataError(f"data: the label of item {at} is {label!r}; expected a whole number or text")
        if classes and (label >= len(classes) or label < 0 if isinstance(label, int) else label not in classes):
            raise DataError(f"data: the label of item {at} is {label!r}, and there are classes 0 to {len(classes) - 1}")
    names = ["" if label is None else str(label) for label in plain]
    return [classes[label] if classes and isinstance(label, int) else names[at] for at, label in enumerate(plain)]


def _digest(*parts: Any) -> str:
    """Hex digits that change with the content of arrays, tensors and plain values."""
    digest = hashlib.sha256()
    for part in parts:
        array = part.detach().cpu().contiguous().numpy() if isinstance(part, Tensor) else part
        if isinstance(array, np.ndarray):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        else:
            digest.update(pickle.dumps(array))
    return digest.hexdigest()[:8]
