"""Measures of how unevenly labels are distributed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels._counts import (
    CountsLike,
    FloatArray,
    LabelCounts,
    as_counts,
    as_floats,
    as_target,
    check_amounts,
    row_blocks,
)
from fedskew.mixing import Programme


def entropy(counts: CountsLike) -> float | FloatArray:
    """Shannon entropy of label counts in bits, `-sum p log2 p` with 0 log 0 = 0 (FedEntOpt, section III).

    Args:
        counts: Label counts, shape `(classes,)` or `(clients, classes)`.

    Returns:
        A float for one client's counts, else shape `(clients,)`; 0 where there is no sample.

    Raises:
        ArgumentError: NaN, negative counts, or another number of axes.
    """
    array = _vector_or_counts(counts)
    if array.ndim == 1:
        return float(_entropies(array[None])[0])
    bits = np.empty(len(array))
    for part in row_blocks(array):
        bits[part] = _entropies(array[part])
    return bits


def _entropies(rows: FloatArray) -> FloatArray:
    sizes = rows.sum(axis=1, keepdims=True)
    shares = np.divide(rows, sizes, out=np.zeros_like(rows), where=sizes > 0)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    logs *= shares
    bits: FloatArray = np.maximum(-logs.sum(axis=1), 0.0)
    return bits


def kl_to_uniform(counts: CountsLike) -> float | FloatArray:
    """Kullback-Leibler divergence of label counts from the uniform mix in bits, `log2(classes) - entropy`.

    Args:
        counts: Label counts, shape `(classes,)` or `(clients, classes)`.

    Returns:
        A float for one client's counts, else shape `(clients,)`; log2(classes) where there is no sample.

    Raises:
        ArgumentError: NaN, negative counts, or another number of axes.
    """
    array = _vector_or_counts(counts)
    divergence = np.maximum(np.log2(array.shape[-1]) - entropy(array), 0.0)
    return float(divergence) if array.ndim == 1 else divergence


def effective_sample_size(weights: ArrayLike, sizes: ArrayLike) -> float:
    """Effective sample size of weighted clients, `1 / sum(weights**2 / sizes)` (FedPALS, section 3.1).

    It is at most the number of samples, which FedAvg's weights reach.

    Args:
        weights: Client weights, shape `(clients,)`, sum 1.
        sizes: Samples of each client, shape `(clients,)`; a client without samples is left out.

    Returns:
        The effective sample size in samples; 0 where no client has weight.

    Raises:
        ArgumentError: Wrong shapes, NaN or negative values.
    """
    weighed, held = as_floats(weights, "weights"), as_floats(sizes, "sizes")
    if weighed.ndim != 1 or not len(weighed):
        raise ArgumentError(f"weights: must have the shape (clients,), not {weighed.shape}")
    if held.shape != weighed.shape:
        raise ArgumentError(f"sizes: must have the shape {weighed.shape} of the weights, not {held.shape}")
    check_amounts(weighed, "weights")
    check_amounts(held, "sizes")
    present = held > 0
    spread = float(np.sum(weighed[present] ** 2 / held[present]))
    return 1 / spread if spread > 0 else 0.0


def projection_distance(counts: CountsLike, target: ArrayLike) -> float:
    """Squared distance from a target label mix to the nearest mix that weighted clients can have.

    `min ||T - sum_i a_i S_i||^2` over weights a >= 0 of sum 1, with S_i the clients' label marginals (FedPALS's
    d(T, S)); exact up to rounding.

    Args:
        counts: Label counts, shape `(clients, classes)`.
        target: Label mix, shape `(classes,)`; normalised here.

    Returns:
        The squared distance; 0 where the target lies in the convex hull of the clients' mixes.

    Raises:
        ArgumentError: Wrong shapes or values, or no client holds a sample.
    """
    held = as_counts(counts)
    residual = Programme(held, as_target(target, held.shape[1])).projection.residual
    return float(residual @ residual)


GROUPS = ("vacant", "minority", "majority")
"""Names of the group numbers of `class_group_matrix`."""


def class_group_matrix(counts: CountsLike) -> NDArray[np.int8]:
    """Return the group of each class at each client: 0 vacant, 1 minority, 2 majority (FedVLS, FedLMD).

    A class is vacant at a client without samples of it, a majority class with more than the client's samples / classes,
    and a minority class otherwise. At an empty client every class is vacant.

    Args:
        counts: Label counts, shape `(clients, classes)`.

    Returns:
        Group numbers, shape `(clients, classes)`.

    Raises:
        ArgumentError: Wrong shape or values.
    """
    held = as_counts(counts)
    groups = np.empty(held.shape, dtype=np.int8)
    for part in row_blocks(held):
        rows = held[part]
        groups[part] = rows > 0
        groups[part] += rows * rows.shape[1] > rows.sum(axis=1, keepdims=True)
    return groups


def _vector_or_counts(counts: CountsLike) -> FloatArray:
    array = as_floats(counts, "counts")
    if array.ndim == 1:
        row: FloatArray = as_counts(array[None])[0]
        return row
    return as_counts(counts if isinstance(counts, LabelCounts) else array)
