"""Measures of a classifier from its confusion matrix, `(classes, classes)`: a row for each true class."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels import as_target

FloatArray = NDArray[np.float64]


def per_class_accuracy(confusion: ArrayLike) -> FloatArray:
    """Compute the share of each class that was recognised, `(classes,)`; NaN where it has no sample."""
    table = _table(confusion)
    present = table.sum(axis=1)
    accuracy = np.full(len(table), np.nan)
    np.divide(np.diagonal(table), present, out=accuracy, where=present > 0)
    return accuracy


def balanced_accuracy(confusion: ArrayLike) -> float:
    """Compute the mean of `per_class_accuracy` over the classes with a sample."""
    accuracy = per_class_accuracy(confusion)
    present = ~np.isnan(accuracy)
    return float(accuracy[present].mean()) if present.any() else float("nan")


def macro_f1(confusion: ArrayLike, present_only: bool = True) -> float:
    """Compute the mean over classes of F1 = 2 TP / (2 TP + FP + FN), 0 where TP is 0.

    The classes are those that have samples or are predicted, as scikit-learn has it by default; with `present_only`
    those that have samples, as WILDS does for iWildCam.
    """
    table = _table(confusion)
    truth, predicted = table.sum(axis=1), table.sum(axis=0)
    classes = truth > 0 if present_only else truth + predicted > 0
    if not classes.any():
        return float("nan")
    f1 = 2 * np.diagonal(table)[classes] / (truth + predicted)[classes]
    return float(f1.mean())


def target_accuracy(confusion: ArrayLike, target: ArrayLike) -> float:
    """Compute the accuracy to expect under the target label mix: the mean of per-class accuracy, weighted by the mix.

    The mix is normalised; NaN if a class of the target has no sample.
    """
    accuracy = per_class_accuracy(confusion)
    mix = as_target(target, len(accuracy))
    return float(accuracy[mix > 0] @ mix[mix > 0])


def _table(confusion: ArrayLike) -> FloatArray:
    table = np.asarray(confusion, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size:
        raise ArgumentError(f"confusion: must be square, (classes, classes), not of shape {table.shape}")
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise ArgumentError("confusion: must hold finite numbers, none below 0")
    return table
