"""Figures of a classifier from its confusion matrix: rows truth, columns prediction."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels import as_target

FloatArray = NDArray[np.float64]


def confusion_matrix(targets: ArrayLike, predictions: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """How often each class (row) was predicted as each class (column): `(num_classes, num_classes)` int64.

    `targets`, `predictions`: `(samples,)` class ids. Raises `ArgumentError` for other shapes, types or ids.
    """
    truth, predicted = _class_ids("targets", targets, num_classes), _class_ids("predictions", predictions, num_classes)
    if len(truth) != len(predicted):
        raise ArgumentError(f"predictions: there are {len(predicted)} for {len(truth)} targets")
    flat = np.bincount(truth * num_classes + predicted, minlength=num_classes * num_classes)
    return flat.reshape(num_classes, num_classes)


def per_class_accuracy(confusion: ArrayLike) -> FloatArray:
    """The share of each class that was recognised, `(classes,)`; NaN where the class has no sample."""
    table = _table(confusion)
    present = table.sum(axis=1)
    accuracy = np.full(len(table), np.nan)
    np.divide(np.diagonal(table), present, out=accuracy, where=present > 0)
    return accuracy


def balanced_accuracy(confusion: ArrayLike) -> float:
    """The mean of `per_class_accuracy` over the classes with a sample; NaN without any sample."""
    accuracy = per_class_accuracy(confusion)
    present = ~np.isnan(accuracy)
    return float(accuracy[present].mean()) if present.any() else float("nan")


def macro_f1(confusion: ArrayLike, present_only: bool = True) -> float:
    """The mean over classes of F1 = 2 TP / (2 TP + FP + FN), 0 where TP is 0; NaN without any sample.

    `present_only`: over the classes that occur in the truth, as WILDS does for iWildCam; otherwise over those that
    occur in the truth or are predicted, as scikit-learn does by default.
    """
    table = _table(confusion)
    truth, predicted = table.sum(axis=1), table.sum(axis=0)
    classes = truth > 0 if present_only else truth + predicted > 0
    if not classes.any():
        return float("nan")
    f1 = 2 * np.diagonal(table)[classes] / (truth + predicted)[classes]
    return float(f1.mean())


def target_accuracy(confusion: ArrayLike, target: ArrayLike) -> float:
    """The accuracy to expect under the target label mix: per-class accuracy averaged with the target's shares.

    `target`: `(classes,)` non-negative with a positive sum, normalised here. NaN where a class that the target has is
    without a sample.
    """
    accuracy = per_class_accuracy(confusion)
    mix = as_target(target, len(accuracy))
    return float(accuracy[mix > 0] @ mix[mix > 0])


def _class_ids(name: str, values: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"{name}: must be one-dimensional integers, not {array.dtype} of shape {array.shape}")
    if array.size and not (array.min() >= 0 and array.max() < num_classes):
        raise ArgumentError(f"{name}: must be from 0 to {num_classes - 1}, but {array.min()} to {array.max()} occur")
    return array.astype(np.int64)


def _table(confusion: ArrayLike) -> FloatArray:
    table = np.asarray(confusion, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size:
        raise ArgumentError(f"confusion: must be square, (classes, classes), not of shape {table.shape}")
    if not (np.isfinite(table).all() and (table >= 0).all()):
        raise ArgumentError("confusion: must hold finite numbers, none below 0")
    return table
