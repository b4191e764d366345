"""Outcome cells of a model's predictions: the predicted class, and the bin of its probability."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.labels._counts import FloatArray

MixMethod: TypeAlias = Literal["gls", "em-cells", "bbse", "em"]

EDGES = (0.5, 0.8, 0.95)
"""Where a predicted class's cells are divided by the largest probability."""

NEVER = -1e30
"""The bias of a class that is never predicted; not minus infinity, which some exporters can't handle."""


def outcome_cells(outputs: FloatArray, edges: ArrayLike = EDGES, logits: bool = False) -> NDArray[np.int64]:
    """Return the outcome cell of each sample from its probability of each class, or logit, `(samples, classes)`.

    `edges` divide a predicted class's cells by its probability; its bins stand side by side.
    """
    most = outputs.max(axis=1)
    sure = 1 / np.exp(outputs - most[:, None]).sum(axis=1) if logits else most
    return cells_of(outputs.argmax(axis=1), sure, edges)


def cells_of(predicted: NDArray[np.int64], sure: FloatArray, edges: ArrayLike) -> NDArray[np.int64]:
    """Return the outcome cell of each sample from its predicted class and the probability of that, `(samples,)`."""
    cuts = np.asarray(edges, dtype=np.float64)
    cells: NDArray[np.int64] = predicted * (len(cuts) + 1) + np.digitize(sure, cuts)
    return cells


def outcome_table(labels: NDArray[np.int64], cells: NDArray[np.int64], classes: int, bins: int) -> FloatArray:
    """Count samples by true class and outcome cell, `(classes, classes * bins)`, as `estimate_mix` takes them."""
    number = classes * bins
    counts: FloatArray = np.bincount(labels * number + cells, minlength=classes * number).astype(float)
    return counts.reshape(classes, number)
