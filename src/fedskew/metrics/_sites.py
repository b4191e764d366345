"""Figures of a model at each client, by the client's own test samples, and what they are over the clients.

AUROC and PR-AUC (average precision) are scikit-learn's, one class against the others, mean over the classes of which a
client has test samples, and samples of other classes too. The calibration error is that of Guo et al., 2017 (ICML,
arXiv 1706.04599): 15 bins of equal width, right-closed, over the probability of the predicted class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.metrics._measures import balanced_accuracy, macro_f1

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_BINS = 15


@dataclass(frozen=True)
class SiteRow:
    """The figures of one model at one client, by the client's own test samples; NaN where one is undefined.

    Attributes:
        client: The client's id.
        row: Whose model it is: the one that the client trained "alone", the federation's "common" one, the client's
            "personal" one, or the one of all clients' samples in one place, "pooled".
        samples: The client's test samples, at least one.
        loss: Mean cross-entropy.
    """

    client: int
    row: str
    samples: int
    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    auroc: float
    pr_auc: float
    ece: float
    loss: float

    ROWS = ("alone", "common", "personal", "pooled")
    """The rows in the order of a table."""
    FIGURES = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "pr_auc", "ece", "loss")
    LOW = ("ece", "loss")
    """The figures that are the better the lower they are."""

    @staticmethod
    def of(row: str, tests: Sequence[IntArray], logits: Callable[[int], ArrayLike | Tensor]) -> tuple[SiteRow, ...]:
        """Make one row of the table for every client that has test samples.

        Args:
            row: Whose model the logits are of.
            tests: Class ids of each client's test samples; `tests[client]` is `(samples,)`, possibly none.
            logits: Called with the id of each client that has test samples, in order; returns the logits (or logarithms
                of probabilities) of these samples, `(samples, classes)`, in the order of `tests[client]`.
        """
        return tuple(
            SiteRow(client, row, len(labels), **_figures(logits(client), labels))
            for client, labels in enumerate(tests)
            if len(labels)
        )

    def cells(self) -> list[Any]:
        """Return the values as a line of CSV holds them; None where one is undefined."""
        return [None if value != value else value for value in vars(self).values()]

    @staticmethod
    def over_clients(rows: Sequence[SiteRow]) -> dict[str, dict[str, dict[str, Any]]]:
        """Summarise rows over the clients: `found[row][figure]`, by the rows that there are, in the order of a table.

        Each has `clients` (for how many the figure is defined), `mean`, `weighted` (mean, weighted by test samples),
        `median`, `worst_tenth` (mean over the worst tenth of the clients, their number rounded up), `std` (standard
        deviation, ddof 0), and, where there is a row "alone" to compare with, `losing`: how many clients have a worse
        figure than alone. Numbers are None where no client has the figure.
        """
        kinds = [kind for kind in SiteRow.ROWS if any(one.row == kind for one in rows)]
        by_kind = {kind: {one.client: one for one in rows if one.row == kind} for kind in kinds}
        return {
            kind: {figure: _summary(by_kind[kind], by_kind.get("alone", {}), figure) for figure in SiteRow.FIGURES}
            for kind in kinds
        }


def _figures(logits: ArrayLike | Tensor, labels: ArrayLike) -> dict[str, float]:
    """Compute `SiteRow.FIGURES` of a model, by its logits, `(samples, classes)`, and class ids, `(samples,)`.

    A figure is NaN where it is undefined: AUROC and PR-AUC of samples of one class, and all that are made of
    probabilities where a logit is not finite.
    """
    z = np.array(logits.detach().cpu() if hasattr(logits, "detach") else logits, dtype=np.float64)
    y = np.asarray(labels, dtype=np.int64)
    if z.ndim != 2 or y.shape != z.shape[:1] or not len(y):
        raise ArgumentError(f"logits: must be (samples, classes) of {y.size} labels, at least one, not {z.shape}")
    if y.min() < 0 or y.max() >= z.shape[1]:
        raise ArgumentError(f"labels: must be class ids below {z.shape[1]}, the number of columns of logits")
    classes, predicted = z.shape[1], z.argmax(axis=1)
    confusion = np.bincount(y * classes + predicted, minlength=classes**2).reshape(classes, classes)
    found = dict.fromkeys(SiteRow.FIGURES, math.nan) | {
        "accuracy": float((predicted == y).mean()),
        "balanced_accuracy": balanced_accuracy(confusion),
        "macro_f1": macro_f1(confusion),
    }
    if not np.isfinite(z).all():
        return found
    import torch  # here, as commands that train nothing start sooner without it

    log_probabilities = torch.log_softmax(torch.from_numpy(z), dim=1).numpy()
    probabilities = np.exp(log_probabilities)
    ranked = [ranking(probabilities[:, own], y == own) for own in np.unique(y) if (y != own).any()]
    if ranked:
        found["auroc"], found["pr_auc"] = np.mean(ranked, axis=0).tolist()
    right, confidence = predicted == y, probabilities.max(axis=1)
    at = np.searchsorted(np.linspace(0, 1, _BINS + 1)[1:-1], confidence)
    found["ece"] = float(np.abs(np.bincount(at, right - confidence)).sum() / len(y))
    found["loss"] = float(-log_probabilities[np.arange(len(y)), y].mean())
    return found


def ranking(scores: FloatArray, positive: NDArray[np.bool_]) -> tuple[float, float]:
    """AUROC and average precision of scores for a class that has samples and lacks some; equal scores are one step."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)
    hits, taken = np.cumsum(positive[order])[last], np.flatnonzero(last) + 1
    gained, missed = np.diff(hits, prepend=0), np.diff(taken - hits, prepend=0)
    area = float((missed * (hits - gained / 2)).sum() / (hits[-1] * (taken[-1] - hits[-1])))
    return area, float((gained * hits / taken).sum() / hits[-1])


def _summary(rows: dict[int, SiteRow], alone: dict[int, SiteRow], figure: str) -> dict[str, Any]:
    known = {client: value for client, one in rows.items() if math.isfinite(value := getattr(one, figure))}
    values, sign = np.array(list(known.values())), -1 if figure in SiteRow.LOW else 1
    found: dict[str, Any] = {"clients": len(known)}
    if not known:
        return found | dict.fromkeys(("mean", "weighted", "median", "worst_tenth", "std"))
    worst = sign * np.sort(sign * values)[: -(-len(values) // 10)]
    sizes = [rows[client].samples for client in known]
    found |= {
        "mean": float(values.mean()),
        "weighted": float(np.average(values, weights=sizes)),
        "median": float(np.median(values)),
        "worst_tenth": float(worst.mean()),
        "std": float(values.std()),
    }
    if alone and rows is not alone:
        pairs = [(value, getattr(alone[client], figure)) for client, value in known.items() if client in alone]
        found["losing"] = sum(sign * value < sign * other for value, other in pairs)
    return found
