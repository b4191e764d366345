"""Shared by the readers of a user's own data: numbering classes and clients, a test part, normalisation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data._dataset import Dataset
from fedskew.errors import ArgumentError, DataError
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
) -> Dataset:
    """Build the data set; inputs but token ids are standardised by channel, in place, as the training part is.

    `classes` and `clients` may have no sample; `numbered` are all classes in the order of their ids, where that is set;
    `where` says in messages where they were read from.
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
