"""The classes that a client holds many of, few of, none of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels import GROUPS, class_group_matrix


class ClassGroups(NamedTuple):
    """Class ids, ascending, int64; each class is in one group."""

    majority: NDArray[np.int64]
    minority: NDArray[np.int64]
    vacant: NDArray[np.int64]


def class_groups(counts: ArrayLike) -> ClassGroups:
    """Divide the classes by one client's counts, `(classes,)`.

    With n samples in C classes, a class is a majority class with more than n / C samples, a minority class with some
    but no more than that, vacant with none. The FedVLS paper gives no threshold; this one (FedLMD's) gives its table 7.
    """
    held = np.asarray(counts)
    if held.ndim != 1:
        raise ArgumentError(f"counts: must be one client's, (classes,), not of shape {held.shape}")
    (group,) = class_group_matrix(held[None])
    return ClassGroups(*(np.flatnonzero(group == GROUPS.index(name)) for name in ClassGroups._fields))
