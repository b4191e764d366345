"""Measures of cohorts (label mixes, class groups, how far updates point apart), and of confusion matrices."""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, LabelCounts, as_amounts, as_counts, as_target, class_group_matrix
from fedskew.parameters import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor


def mix_distance(weights: ArrayLike, counts: CountsLike, target: ArrayLike) -> float:
    """Compute the squared distance of the effective label mix from the target, which FedPALS minimises at strength 0.

    The effective label mix is the weighted mean of the clients' marginals.

    Args:
        weights: Weights as they are used, shape `(clients,)`, sum 1.
        counts: Label counts, shape `(clients, classes)`; the marginals of an empty client are 0.
    """
    marginals = LabelCounts(as_counts(counts)).marginals
    shares = as_amounts(weights, "weights", (len(marginals),), "one number per client of counts")
    gap = shares @ marginals - as_target(target, marginals.shape[1])
    return float(gap @ gap)


class ClassGroups(NamedTuple):
    """The ids of the classes that a client holds many, few or no samples of, ascending; each is in one group."""

    majority: IntArray
    minority: IntArray
    vacant: IntArray


def class_groups(counts: ArrayLike) -> ClassGroups:
    """Divide the classes by one client's counts.

    With n samples in C classes, a class is a majority class with more than n / C samples, a minority class with some
    but no more than that, vacant with none. The FedVLS paper gives no threshold; this one (FedLMD's) gives its table 7.
    """
    (group,) = class_group_matrix(as_amounts(counts, "counts", ("classes",))[None])
    return ClassGroups(*(np.flatnonzero(group == number) for number in (2, 1, 0)))


def drift_diversity(updates: "ArrayLike | Tensor", norms: ArrayLike | None = None) -> float:
    """Compute the sum of the squared norms of the updates over the squared norm of their sum.

    1/clients where all updates are the same, 1 where they are orthogonal, infinite where they cancel out; 1/clients if
    all are zero. FedVLS, table 17; the gradient diversity of Yin et al., 2018, of updates instead of gradients.

    Args:
        updates: Client model minus the model that was sent, shape `(clients, parameters)`; summed in their dtype,
            unweighted.
        norms: The norm of each update, shape `(clients,)`, if known; then `updates` may be their sum in one row.
    """
    import torch  # here, as commands that train nothing start sooner without it

    rows = updates if isinstance(updates, torch.Tensor) else torch.tensor(np.asarray(updates, dtype=np.float64))
    if rows.ndim != 2 or not len(rows):
        raise ArgumentError(f"updates: must be (clients, parameters), not of shape {tuple(rows.shape)}")
    if not rows.is_floating_point():
        raise ArgumentError(f"updates: must be of floating point, not {rows.dtype}")
    clients = len(rows) if norms is None else np.size(norms)
    if norms is not None and (np.ndim(norms) != 1 or len(rows) not in (1, clients)):
        raise ArgumentError(f"norms: expected one for each of {len(rows)} updates, got shape {np.shape(norms)}")
    # In the updates' own dtype: float64 sums of float32 rows would take longest of all in a round without training.
    apart = float(torch.linalg.vector_norm(rows) if norms is None else np.linalg.norm(np.asarray(norms)))
    together = float(torch.linalg.vector_norm(rows.sum(dim=0)))
    if not math.isfinite(apart + together):  # overflow, NaN or infinity
        apart = float(torch.linalg.vector_norm(rows, dtype=torch.float64))
        together = float(torch.linalg.vector_norm(rows.sum(dim=0, dtype=torch.float64)))
    if not math.isfinite(apart):
        raise ArgumentError("updates: must be finite, but NaN or infinity occurs")
    if apart == 0:
        return 1.0 / clients
    return (apart / together) ** 2 if together > 0 else math.inf


def per_class_accuracy(confusion: ArrayLike) -> FloatArray:
    """Compute the share of each class that was recognised, `(classes,)`; NaN where it has no sample."""
    table = _table(confusion)
    present = table.sum(axis=1)
    accuracy = np.full(len(table), np.nan)
    np.divide(np.diagonal(table), present, out=accuracy, where=present > 0)
    return accuracy


def mean_known(values: FloatArray) -> float:
    """Return the mean of the values that are defined; NaN where none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def balanced_accuracy(confusion: ArrayLike) -> float:
    """Compute the mean of `per_class_accuracy` over the classes with a sample."""
    return mean_known(per_class_accuracy(confusion))


def macro_f1(confusion: ArrayLike, present_only: bool = True) -> float:
    """Compute the mean over classes of F1 = 2 TP / (2 TP + FP + FN), 0 where TP is 0.

    The classes are those that have samples or are predicted, as scikit-learn has it by default; with `present_only`
    those that have samples, as WILDS does for iWildCam.
    """
    table = _table(confusion)
    truth, predicted = table.sum(axis=1), table.sum(axis=0)
    classes = truth > 0 if present_only else truth + predicted > 0
    return mean_known(2 * np.diagonal(table)[classes] / (truth + predicted)[classes])


def target_accuracy(confusion: ArrayLike, target: ArrayLike) -> float:
    """Compute the accuracy to expect under the target label mix: the mean of per-class accuracy, weighted by the mix.

    The mix is normalised; NaN if a class of the target has no sample.
    """
    accuracy = per_class_accuracy(confusion)
    mix = as_target(target, len(accuracy))
    return float(accuracy[mix > 0] @ mix[mix > 0])


def _table(confusion: ArrayLike) -> FloatArray:
    table = as_amounts(confusion, "confusion", ("classes", "classes"))
    if table.shape[0] != table.shape[1]:
        raise ArgumentError(f"confusion: must be square, (classes, classes), not of shape {table.shape}")
    return table
