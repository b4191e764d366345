"""Checks of what a selection is asked for, shared by the fillers."""

from __future__ import annotations

from numbers import Integral

import numpy as np

from fedskew.errors import ArgumentError


def check_round(clients: int, size: object, first: object) -> None:
    """Raise unless `size` different ones of so many clients can be drawn, beginning with `first` where it is given."""
    if not _is_whole_in(size, 1, clients):
        raise ArgumentError(f"size: must be a whole number from 1 to the {clients} clients there are, not {size!r}")
    if first is not None and not _is_whole_in(first, 0, clients - 1):
        raise ArgumentError(f"first: must be a client id from 0 to {clients - 1}, not {first!r}")


def check_rng(rng: object) -> None:
    """Raise unless `rng` is a numpy generator; for those who draw."""
    if not isinstance(rng, np.random.Generator):
        raise ArgumentError(f"rng: must be a numpy.random.Generator, not {type(rng).__name__}")


def _is_whole_in(value: object, least: int, most: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) <= most
