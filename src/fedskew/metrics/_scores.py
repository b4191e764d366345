"""Figures of probabilities: how well each class is told from the others, and whether confidence can be believed.

AUROC and PR-AUC (average precision) are scikit-learn's, one class against the others, mean over the classes of which
there are samples, and samples of other classes too. The calibration error is that of Guo et al., 2017 (ICML, arXiv
1706.04599): 15 bins of equal width, right-closed, over the probability of the predicted class.

Intervals are by bootstrap (Efron and Tibshirani, 1993, chapter 13): the test samples are drawn again with replacement,
as many as there are, and the ends are quantiles of a figure's values. That is the chance in the test samples alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.metrics._measures import balanced_accuracy, macro_f1, mean_known
from fedskew.parameters import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor

_BINS = 15
_ENDS = [(1 - 0.95) / 2, (1 + 0.95) / 2]
_DRAWS = 500
_WORK, _FEWEST, _MOST = 20_000_000, 100, 20_000_000
_AT_ONCE = 250_000
_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


@dataclass(frozen=True, eq=False)
class Scores:
    """Logits of labelled samples, `(samples, classes)`, and their class ids, `(samples,)`.

    Scores.of(logits, labels).figures()["auroc"]
    """

    logits: FloatArray
    labels: IntArray

    EDGES: ClassVar[FloatArray] = np.linspace(0, 1, _BINS + 1)[1:-1]
    """The confidences between the bins of the calibration error."""

    @classmethod
    def of(cls, logits: ArrayLike | Tensor, labels: ArrayLike | Tensor) -> Scores:
        """Check logits (or logarithms of probabilities) and labels; ArgumentError where they do not go together."""
        z, y = (np.asarray(one.detach().cpu() if hasattr(one, "detach") else one) for one in (logits, labels))
        z, y = z.astype(np.float64), y.astype(np.int64)
        if z.ndim != 2 or y.shape != z.shape[:1] or not len(y):
            raise ArgumentError(f"logits: must be (samples, classes) of {y.size} labels, at least one, not {z.shape}")
        if y.min() < 0 or y.max() >= z.shape[1]:
            raise ArgumentError(f"labels: must be class ids below {z.shape[1]}, the number of columns of logits")
        return cls(z, y)

    @cached_property
    def log_probabilities(self) -> FloatArray:
        """Logarithms of the probabilities, `(samples, classes)`."""
        import torch  # here, as commands that train nothing start sooner without it

        return torch.log_softmax(torch.from_numpy(np.ascontiguousarray(self.logits)), dim=1).numpy()

    @cached_property
    def probabilities(self) -> FloatArray:
        """Probabilities, `(samples, classes)`."""
        return np.exp(self.log_probabilities)

    def confusion(self, threshold: float | None = None) -> IntArray:
        """Count, `(classes, classes)`, a row for each true class, what samples are taken for (see `threshold`)."""
        classes, predicted = self.logits.shape[1], self.logits.argmax(axis=1)
        if threshold is not None:
            predicted = (self.probabilities[:, 1] >= threshold).astype(np.int64)
        return np.bincount(self.labels * classes + predicted, minlength=classes**2).reshape(classes, classes)

    def figures(self) -> dict[str, Any]:
        """Compute accuracy, balanced_accuracy, macro_f1 and loss (mean cross-entropy), and what `of_scores` does."""
        table = self.confusion()
        found = {
            "accuracy": float(np.trace(table) / len(self.labels)),
            "balanced_accuracy": balanced_accuracy(table),
            "macro_f1": macro_f1(table),
            **self.of_scores(),
            "loss": math.nan,
        }
        if np.isfinite(self.logits).all():
            found["loss"] = float(-self.log_probabilities[np.arange(len(self.labels)), self.labels].mean())
        return found

    def of_scores(self) -> dict[str, Any]:
        """Compute what a confusion matrix does not tell: NaN, or None, where a logit is not finite.

        These are `auroc` and `pr_auc` (NaN for samples of one class); `per_class_auroc` and `per_class_pr_auc`,
        `(classes,)`; `ece`; and `reliability`, a row `[samples, right, sum of their confidences]` for each bin.
        """
        classes = self.logits.shape[1]
        aurocs, pr_aucs = np.full((2, classes), math.nan)
        ece, reliability = math.nan, None
        if np.isfinite(self.logits).all():
            aurocs, pr_aucs = Scores.rankings(self.probabilities, self.labels[:, None] == np.arange(classes))
            right, confidence = self.logits.argmax(axis=1) == self.labels, self.probabilities.max(axis=1)
            at = np.searchsorted(Scores.EDGES, confidence)
            sums = [np.bincount(at, one, minlength=_BINS) for one in (np.ones(len(at)), right, confidence)]
            ece = float(np.abs(np.bincount(at, right - confidence)).sum() / len(at))
            reliability = np.stack(sums, axis=1).tolist()
        return {
            "auroc": mean_known(aurocs),
            "pr_auc": mean_known(pr_aucs),
            "per_class_auroc": aurocs,
            "per_class_pr_auc": pr_aucs,
            "ece": ece,
            "reliability": reliability,
        }

    def threshold(self, figure: str = "balanced_accuracy") -> float | None:
        """Choose the probability from which on a sample is taken for the second of two classes.

        It lies between two probabilities that occur, where accuracy, balanced accuracy or macro F1 of these samples is
        highest; nearest to 0.5 where several are equal. None where there are other than two classes with samples.
        """
        if self.logits.shape[1] != 2 or len(np.unique(self.labels)) < 2 or not np.isfinite(self.logits).all():
            return None
        order = np.argsort(self.probabilities[:, 1], kind="stable")
        scores, positive = self.probabilities[order, 1], self.labels[order]
        first = np.flatnonzero(np.diff(scores, prepend=-1.0))  # samples from here on are taken for the second class
        below = np.concatenate([[0], np.cumsum(positive)])[first]
        missed, hits = below, positive.sum() - below
        kept, alarms = first - below, len(scores) - first - hits
        recall = np.stack([kept / (kept + alarms), hits / (hits + missed)])
        by = {
            "accuracy": (kept + hits) / len(scores),
            "balanced_accuracy": recall.mean(axis=0),
            "macro_f1": (2 * kept / (2 * kept + missed + alarms) + 2 * hits / (2 * hits + missed + alarms)) / 2,
        }[figure]
        cuts = (scores[first] + np.concatenate([[0.0], scores[first[1:] - 1]])) / 2
        best = np.flatnonzero(by >= by.max() - 1e-12)
        return float(cuts[best[np.abs(cuts[best] - 0.5).argmin()]])

    @staticmethod
    def rankings(probabilities: ArrayLike, positive: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Compute AUROC and PR-AUC of each column of scores in [0, 1], `(samples, columns)`, by which are `positive`.

        Both are `(columns,)`; NaN where all samples of a column are positive, or none.
        """
        scores, truth = np.asarray(probabilities, dtype=np.float64), np.asfortranarray(positive, dtype=np.bool_)
        if scores.ndim != 2 or scores.shape != truth.shape:
            raise ArgumentError(
                f"probabilities: must be (samples, columns) as positive is, not of shape {scores.shape}"
            )
        if scores.size and not (scores.min() >= 0 and scores.max() <= 1):
            raise ArgumentError("probabilities: must be in [0, 1]")
        found = np.full((2, scores.shape[1]), np.nan)
        for column in np.flatnonzero(truth.any(axis=0) & ~truth.all(axis=0)):
            found[:, column] = _ranking(scores[:, column], truth[:, column])
        return found[0], found[1]

    @staticmethod
    def intervals(
        confusion: IntArray, rng: np.random.Generator, scores: Scores | None = None, target: FloatArray | None = None
    ) -> dict[str, list[float]]:
        """Return both ends of each figure's interval of 95 %, by name, without those undefined in every draw.

        A confusion matrix gives those of accuracy, balanced_accuracy, macro_f1 and, with a target's mix, of
        target_accuracy; `scores` of the same samples those of auroc, pr_auc, ece and loss, by fewer draws where samples
        times classes are many, and beyond twenty million by none.
        """
        values = dict(_of_confusion(confusion, rng, target)) if confusion.sum() else {}
        if scores is not None and scores.logits.size <= _MOST and np.isfinite(scores.logits).all():
            values |= _of_scores(scores, rng)
        return ends(values)


def _ranking(scores: FloatArray, positive: NDArray[np.bool_]) -> tuple[float, float]:
    """AUROC and average precision of scores for a class that has samples and lacks some; equal scores are one step."""
    every, own = np.sort(scores), np.sort(scores[positive])
    # Of all samples, and of the class's: how many lie below each score of the class, and how many up to it.
    below, upto, own_below, own_upto = (np.searchsorted(some, own, side) for some in (every, own) for side in _SIDES)
    others_below, others_equal = below - own_below, upto - below - (own_upto - own_below)
    area = float((others_below + others_equal / 2).sum() / (len(own) * (len(every) - len(own))))
    return area, float(((len(own) - own_below) / (len(every) - below)).mean())


def _of_confusion(confusion: IntArray, rng: np.random.Generator, target: FloatArray | None) -> Mapping[str, FloatArray]:
    classes, total = len(confusion), int(confusion.sum())
    cells = np.flatnonzero(confusion)
    drawn = rng.multinomial(total, confusion.reshape(-1)[cells] / total, size=_DRAWS)

    def by(label: IntArray, which: IntArray) -> FloatArray:
        places = np.arange(_DRAWS)[:, None] * classes + label[which]
        weights = drawn[:, which].reshape(-1).astype(np.float64)
        return np.bincount(places.reshape(-1), weights, _DRAWS * classes).reshape(_DRAWS, classes).astype(np.float64)

    every = np.arange(len(cells))
    truth, predicted = by(cells // classes, every), by(cells % classes, every)
    right = by(cells // classes, np.flatnonzero(cells // classes == cells % classes))
    there = truth > 0
    recall = right / np.where(there, truth, np.nan)
    f1 = np.where(there, 2 * right, 0.0) / np.where(there, truth + predicted, 1.0)
    found = {
        "accuracy": right.sum(axis=1) / total,
        "balanced_accuracy": np.where(there, recall, 0.0).sum(axis=1) / there.sum(axis=1),
        "macro_f1": f1.sum(axis=1) / there.sum(axis=1),
    }
    if target is not None:
        found["target_accuracy"] = recall[:, target > 0] @ target[target > 0]
    return found


def _of_scores(scores: Scores, rng: np.random.Generator) -> Mapping[str, FloatArray]:
    samples = len(scores.labels)
    present = np.unique(scores.labels)
    ranked = [Ranked(scores.probabilities[:, label], scores.labels == label) for label in present]
    losses = -scores.log_probabilities[np.arange(samples), scores.labels]
    confidence = scores.probabilities.max(axis=1)
    gaps = (scores.logits.argmax(axis=1) == scores.labels) - confidence
    bins = np.searchsorted(Scores.EDGES, confidence)
    inside = np.equal.outer(bins, np.unique(bins)) * gaps[:, None]
    parts = []
    for times in drawn_again(rng, scores.logits):
        auroc, pr_auc = over_classes([one.areas(times) for one in ranked])
        parts.append([auroc, pr_auc, np.abs(inside.T @ times).sum(axis=0) / samples, losses @ times / samples])
    return dict(zip(("auroc", "pr_auc", "ece", "loss"), np.concatenate(parts, axis=1), strict=True))


def drawn_again(rng: np.random.Generator, logits: FloatArray) -> Iterator[FloatArray]:
    """Yield how often each sample is drawn, `(samples, draws)`, by some draws at a time."""
    samples, draws = len(logits), int(np.clip(_WORK // logits.size, _FEWEST, _DRAWS))
    for start in range(0, draws, each := max(1, _AT_ONCE // samples)):
        columns = min(each, draws - start)
        places = rng.integers(samples, size=(samples, columns)) * columns + np.arange(columns)
        yield np.bincount(places.reshape(-1), minlength=samples * columns).reshape(samples, columns).astype(float)


def over_classes(values: ArrayLike) -> FloatArray:
    """Return the mean over the first axis of what is defined; NaN where nothing is."""
    each = np.asarray(values, dtype=np.float64)
    known = np.isfinite(each)
    with np.errstate(invalid="ignore"):
        mean: FloatArray = np.where(known, each, 0.0).sum(axis=0) / known.sum(axis=0)
    return mean


def ends(values: Mapping[str, FloatArray]) -> dict[str, list[float]]:
    """Return both ends of the interval of 95 % of each figure, of its values by draws, without those that have none."""
    known = {name: found[np.isfinite(found)] for name, found in values.items()}
    return {name: np.quantile(found, _ENDS).tolist() for name, found in known.items() if len(found)}


class Ranked:
    """The samples in the order of their scores for one class, highest first; those of equal scores are one step."""

    def __init__(self, scores: FloatArray, positive: NDArray[np.bool_]) -> None:
        self.order = np.argsort(-scores, kind="stable")
        hits = np.flatnonzero(positive[self.order])
        first = np.flatnonzero(np.diff(scores[self.order], prepend=np.inf))
        step = np.searchsorted(first, hits, side="right")
        self.hits, self.ends = hits, np.stack([first[step - 1], np.append(first[1:], len(scores))[step - 1]])

    def areas(self, times: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return AUROC and average precision, `(draws,)`, of samples that count `(samples, draws)` times."""
        times = times[self.order]
        taken, found = _before(times), _before(own := times[self.hits])
        places = np.searchsorted(self.hits, self.ends)  # of the class's samples before a step, and up to its end
        above = taken[self.ends] - found[places]
        with np.errstate(invalid="ignore", divide="ignore"):
            area = 1 - (own * above.mean(axis=0)).sum(axis=0) / (found[-1] * (taken[-1] - found[-1]))
            precision = (own * found[places[1]] / np.maximum(taken[self.ends[1]], 1)).sum(axis=0) / found[-1]
        return area, np.where(found[-1] < taken[-1], precision, np.nan)


def _before(times: FloatArray) -> FloatArray:
    """Return sums of the rows before each, and of all, `(rows + 1, draws)`."""
    return np.concatenate([np.zeros((1, times.shape[1])), np.cumsum(times, axis=0)])
