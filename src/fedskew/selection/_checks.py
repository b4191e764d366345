"""Checks of what a selection is asked for, shared by the components."""

from __future__ import annotations

from numbers import Integral
from typing import TypeGuard

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.selection._protocol import IntArray


def check_round(clients: int, size: object, first: object = None) -> None:
    """Raise unless `size` different ones of so many clients can be drawn, beginning with `first` where it is given."""
    if not _is_whole_in(size, 1, clients):
        raise ArgumentError(f"size: must be a whole number from 1 to the {clients} clients there are, not {size!r}")
    if first is not None and not _is_whole_in(first, 0, clients - 1):
        raise ArgumentError(f"first: must be a client id from 0 to {clients - 1}, not {first!r}")


def check_rng(rng: object) -> None:
    """Raise unless `rng` is a numpy generator; for those who draw."""
    if not isinstance(rng, np.random.Generator):
        raise ArgumentError(f"rng: must be a numpy.random.Generator, not {type(rng).__name__}")


def check_cohort(name: str, cohort: object, clients: int) -> IntArray:
    """Client ids as an array, `(cohort,)`. Raise unless they are whole, different, and there are such clients."""
    ids = np.asarray(cohort)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ArgumentError(f"{name}: expected client ids, whole numbers and one at least, got {cohort!r}")
    if ids.min() < 0 or ids.max() >= clients:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ArgumentError(f"{name}: names client {wrong}, and there are 0 to {clients - 1}")
    if len(np.unique(ids)) < len(ids):
        raise ArgumentError(f"{name}: names a client twice, {ids.tolist()}")
    return ids.astype(np.int64)


def check_first(first: int | None, cohort: IntArray) -> None:
    """Raise unless a cohort that can't be changed begins with `first`, where it is given."""
    if first is not None and first != cohort[0]:
        raise ArgumentError(f"first: the cohort begins with client {cohort[0]} and can't begin with {first!r}")


def is_whole(value: object) -> TypeGuard[int]:
    """A whole number, of Python or numpy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_whole_in(value: object, least: int, most: int) -> bool:
    return is_whole(value) and least <= value <= most
