"""FINCH clustering, by its authors' package.

Sarfraz et al., "Efficient Parameter-free Clustering Using First Neighbor Relations", CVPR 2019: points are linked with
their nearest neighbours, linked points make a cluster, and the clusters' means are clustered again until one is left.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import MissingPackageError


def finch() -> Callable[..., Any]:
    """The package's function. Raises MissingPackageError where it isn't installed."""
    try:
        with warnings.catch_warnings(action="ignore"):  # it misses packages for millions of points
            from finch import FINCH
    except ImportError:
        raise MissingPackageError("FPL clusters prototypes by finch-clust: pip install 'fedskew[fpl]'") from None
    function: Callable[..., Any] = FINCH
    return function


def coarsest_clusters(points: NDArray[np.float32]) -> NDArray[np.int64]:
    """A cluster id from 0 for each point, `(points,)`: the last partition by cosine distance that isn't one cluster.

    `points`: `(points, dim)`, at least one. One cluster, where the first partition is that already.
    """
    if len(points) == 1:
        return np.zeros(1, dtype=np.int64)
    partitions, _, _ = finch()(points, distance="cosine", ensure_early_exit=False, verbose=False)
    return np.asarray(partitions[:, -1], dtype=np.int64)
