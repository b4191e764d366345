"""Checks of what a rule is given, shared by the rules."""

from __future__ import annotations

import math
from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.partition._protocol import IntArray


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{name}: must be a whole number of at least {least}, not {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and float(value) > 0):
        raise ArgumentError(f"{name}: must be a finite number above 0, not {value!r}")


def check_samples(
    labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None
) -> tuple[IntArray, IntArray]:
    """The labels as int64 and how many samples each class has, `(classes,)`."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ArgumentError(f"labels: must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        raise ArgumentError("labels: there is no sample to divide")
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"labels: must be integers, not {array.dtype}")
    array = array.astype(np.int64)
    if array.min() < 0:
        raise ArgumentError(f"labels: must be class ids from 0, but {array.min()} occurs")
    if num_classes is not None:
        check_whole("num_classes", num_classes, 1)
        if array.max() >= num_classes:
            raise ArgumentError(f"labels: class id {array.max()} occurs, but num_classes is {num_classes}")
    check_whole("clients", clients, 1)
    if not isinstance(rng, np.random.Generator):
        raise ArgumentError(f"rng: must be a numpy.random.Generator, not {type(rng).__name__}")
    return array, np.bincount(array, minlength=num_classes or 0)
