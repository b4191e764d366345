"""Outcome cells of a model's predictions: the predicted class, and the bin of its probability; and whether one site's
samples of a class look like the other sites' there: p(x | y) the same everywhere, or not."""

import math
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.findings import IntArray
from fedskew.labels._counts import FloatArray, as_amounts

MixMethod: TypeAlias = Literal["gls", "em-cells", "bbse", "em"]

EDGES = (0.5, 0.8, 0.95)
"""Where a predicted class's cells are divided by the largest probability."""

NEVER = -1e30
"""The bias of a class that is never predicted; not minus infinity, which some exporters can't handle."""

_LEAST_EXPECTED = 5.0


def outcome_cells(outputs: FloatArray, edges: ArrayLike = EDGES, logits: bool = False) -> IntArray:
    """Return samples' outcome cells, by probabilities or logits, `(samples, classes)`; `edges` divide a class."""
    most = outputs.max(axis=1)
    sure = 1 / np.exp(outputs - most[:, None]).sum(axis=1) if logits else most
    return cells_of(outputs.argmax(axis=1), sure, edges)


def cells_of(predicted: IntArray, sure: FloatArray, edges: ArrayLike) -> IntArray:
    """Return the outcome cell of each sample from its predicted class and the probability of that, `(samples,)`."""
    cuts = np.asarray(edges, dtype=np.float64)
    return predicted * (len(cuts) + 1) + np.digitize(sure, cuts)


def outcome_table(labels: IntArray, cells: IntArray, classes: int, bins: int = len(EDGES) + 1) -> FloatArray:
    """Count samples by true class and outcome cell, `(classes, classes * bins)`, as `estimate_mix` takes them."""
    number = classes * bins
    counts: FloatArray = np.bincount(labels * number + cells, minlength=classes * number).astype(float)
    return counts.reshape(classes, number)


def site_p_value(own: ArrayLike, pooled: ArrayLike) -> float:
    """Test whether a model's outcomes at one site differ from those at the others, class by class.

    Label mixes play no part, as each class is compared with itself: Pearson's chi-square of independence for every
    class, summed. Cells in which fewer than five samples are expected are joined. A site can compute it by itself,
    from the sums of all, and tell the number alone.

    Args:
        own: The site's held-out samples by true class and outcome cell, shape `(classes, cells)`.
        pooled: Those of all sites, its own among them, shape `(classes, cells)`.

    Returns:
        How often sites without any difference would differ as much; NaN where there are too few samples or no other's.

    Example:
        >>> round(site_p_value([[30, 10], [10, 30]], [[70, 30], [40, 120]]), 4)
        0.6725
    """
    from scipy.special import chdtrc  # a site's process imports no SciPy

    mine, whole = (as_amounts(table, name, ("classes", "cells")) for table, name in ((own, "own"), (pooled, "pooled")))
    if mine.shape != whole.shape:
        raise ArgumentError(f"own: must have the shape of pooled, {whole.shape}, not {mine.shape}")
    others = whole - mine
    if (others < 0).any():
        raise ArgumentError("own: has more samples than pooled, which must hold them too")
    statistic, dof = 0.0, 0
    for row, rest in zip(mine, others, strict=True):
        both = _joined(np.stack([row, rest]))
        if both.shape[1] > 1:
            expected = both.sum(axis=1, keepdims=True) * both.sum(axis=0) / both.sum()
            statistic += float(((both - expected) ** 2 / expected).sum())
            dof += both.shape[1] - 1
    return float(chdtrc(dof, statistic)) if dof else math.nan


def _joined(both: FloatArray) -> FloatArray:
    """Outcomes of a class here and elsewhere, `(2, cells)`, without cells in which too few are expected."""
    if not both.sum(axis=1).all():
        return both[:, :0]
    least = both.sum(axis=1).min() * both.sum(axis=0) / both.sum()
    order = np.argsort(-least, kind="stable")
    alone = int(np.count_nonzero(least >= _LEAST_EXPECTED))
    if alone > 0 and 0 < least[order[alone:]].sum() < _LEAST_EXPECTED:
        alone -= 1  # the rest takes the rarest of these in
    cells = np.concatenate([both[:, order[:alone]], both[:, order[alone:]].sum(axis=1, keepdims=True)], axis=1)
    return cells[:, cells.sum(axis=0) > 0]
