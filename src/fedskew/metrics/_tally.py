"""What is counted of test samples, in integers that add up over sites, and the figures that follow from their sum.

Of one class a sample these are n_ij, `(classes, classes)`: samples of class i that are taken for class j. Of several
labels, or none, n_cij, `(labels, 2, 2)`: samples that lack or have label c (i = 0 or 1) and are taken to (j); and how
many samples are right in all labels.

With scores also h_cib, samples that are of class c (i = 1) or not (i = 0) and whose score u of it is in bin b; and of
one class a sample, by 15 bins of confidence, samples, how many are right, and 1024 times the sum of their confidences.

    u = log-odds of c, less those of 1 / classes (of labels: of 1 / 2)
    b = floor(32 asinh(2 u) / asinh(16)), from -32 to 31: 0.05 wide at 0, 0.4 at 4, 0.9 at 8

AUROC and PR-AUC are scikit-learn's of scores that are equal within a bin; from that
of the scores themselves the AUROC of c differs by at most sum_b h_c0b h_c1b / (2 sum_b h_c0b sum_b h_c1b).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew import findings
from fedskew.metrics._findings import of_counts
from fedskew.metrics._measures import mean_known
from fedskew.metrics._scores import Scores
from fedskew.parameters import FloatArray, IntArray

_SURE, _UNITS = len(Scores.EDGES) + 1, 1024
_OFF = 1 / _UNITS  # each sum of confidences is rounded once at each site that has a sample in its bin


@dataclass(frozen=True)
class Tally:
    """What is counted, as one vector of integers: of so many classes, of which a sample may have several, or none."""

    classes: int
    several: bool = False
    scores: bool = False

    BINS: ClassVar[int] = 64
    """Bins of the scores of each class."""

    @property
    def size(self) -> int:
        """How many integers there are."""
        more = 2 * self.BINS * self.classes + (0 if self.several else 3 * _SURE)
        return self._main + self.several + self.scores * more

    @property
    def _main(self) -> int:
        return 4 * self.classes if self.several else self.classes**2

    def count(self, logits: ArrayLike, targets: ArrayLike) -> IntArray:
        """Count samples by their logits, `(samples, classes)`, and targets, `(samples,)`, class ids or bits."""
        y = np.asarray(targets, dtype=np.int64)
        z = np.asarray(logits).reshape(len(y), self.classes)
        if not self.several:
            found = [np.bincount(y * self.classes + z.argmax(axis=1), minlength=self.classes**2)]
            truth = (y[:, None] == np.arange(self.classes)).astype(np.int64)
        else:
            truth, said = findings.as_table(y, self.classes), (z >= 0).astype(np.int64)
            cells = np.arange(self.classes) * 4 + 2 * truth + said
            found = [
                np.bincount(cells.reshape(-1), minlength=self._main),
                (truth == said).all(axis=1).sum(keepdims=True),
            ]
        return np.concatenate([*found, *(self._scored(z.astype(np.float64), y, truth) if self.scores else ())])

    def _scored(self, z: FloatArray, y: IntArray, truth: IntArray) -> Iterator[IntArray]:
        """Yield the scores by bin; of logits that are not finite the lowest, and no confidence."""
        if self.several:
            odds = np.nan_to_num(z, nan=-np.inf)
        else:
            probabilities = np.nan_to_num(np.exp(Scores(z, y).log_probabilities))
            with np.errstate(divide="ignore"):
                odds = np.log(probabilities) - np.log1p(-np.minimum(probabilities, 1.0))
            odds += np.log(max(self.classes - 1, 1))
        bins = np.floor(np.clip(32 * np.arcsinh(2 * odds) / np.arcsinh(16), -32, 31)).astype(np.int64) + 32
        places = (2 * np.arange(self.classes) + truth) * self.BINS + bins
        yield np.bincount(places.reshape(-1), minlength=2 * self.BINS * self.classes)
        if not self.several:
            sure = np.minimum(probabilities.max(axis=1, initial=0.0), 1.0)
            at = np.searchsorted(Scores.EDGES, sure)
            sums = [np.bincount(at, one, minlength=_SURE) for one in (np.ones(len(y)), z.argmax(axis=1) == y, sure)]
            yield np.rint(np.stack(sums, axis=1) * [1, 1, _UNITS]).astype(np.int64).reshape(-1)

    def table(self, counts: IntArray) -> IntArray:
        """Return the confusion matrix, or that of each label, `(labels, 2, 2)`."""
        return counts[: self._main].reshape((self.classes, 2, 2) if self.several else (self.classes, self.classes))

    def samples(self, counts: IntArray) -> int:
        """Return how many samples were counted."""
        table = self.table(counts)
        return int(table[0].sum() if self.several else table.sum())

    def right(self, counts: IntArray) -> int:
        """Return how many of them are right."""
        return int(counts[self._main]) if self.several else int(np.trace(self.table(counts)))

    def refuse(self, counts: IntArray) -> str | None:
        """Say why no samples can be counted so; None where some can."""
        if (counts < 0).any():
            return "a number of samples is below 0"
        if self.scores and (reason := self._refuse_scores(counts)) is not None:
            return reason
        if not self.several:
            return None
        table, right = self.table(counts), self.right(counts)
        sizes, fewest = table.sum(axis=(1, 2)), (table[:, 0, 0] + table[:, 1, 1]).min()
        if (sizes != sizes[0]).any():
            return f"labels are of {sizes.min()} to {sizes.max()} samples, and all are of the same"
        wrong = int((sizes - table[:, 0, 0] - table[:, 1, 1]).sum())
        if not sizes[0] - wrong <= right <= fewest:
            return f"{right} samples are right in all labels, and one label is right of {fewest}"
        return None

    def _refuse_scores(self, counts: IntArray) -> str | None:
        by_score, table = self._by_score(counts), self.table(counts)
        if self.several:
            above = by_score[:, :, self.BINS // 2 :].sum(axis=2)
            same = np.array_equal(np.stack([by_score.sum(axis=2) - above, above], axis=2), table)
            return None if same else "scores are of other samples than labels"
        samples, right, sure = self._by_confidence(counts).T
        positives, whole = table.sum(axis=1), table.sum()
        if not np.array_equal(by_score.sum(axis=2).T, [whole - positives, positives]) or samples.sum() != whole:
            return "scores are of other samples than classes"
        low, high = (np.append(0.0, Scores.EDGES) - _OFF) * samples, (np.append(Scores.EDGES, 1.0) + _OFF) * samples
        if right.sum() != np.trace(table) or (right > samples).any():
            return "confidences are of other samples than classes"
        return "confidences are in other bins" if ((sure < _UNITS * low) | (sure > _UNITS * high)).any() else None

    def _by_score(self, counts: IntArray) -> IntArray:
        start = self._main + self.several
        return counts[start : start + 2 * self.BINS * self.classes].reshape(self.classes, 2, self.BINS)

    def _by_confidence(self, counts: IntArray) -> IntArray:
        return counts[-3 * _SURE :].reshape(_SURE, 3)

    def figures(self, counts: IntArray) -> dict[str, Any]:
        """Return the figures of several labels that `finding_figures` makes of logits, as far as they follow."""
        aurocs, pr_aucs, _ = self._rankings(counts)
        means = {"auroc": mean_known(aurocs), "pr_auc": mean_known(pr_aucs)} if self.scores else {}
        return of_counts(self.table(counts), self.right(counts)) | {"aurocs": aurocs, "pr_aucs": pr_aucs} | means

    def of_scores(self, counts: IntArray) -> dict[str, Any]:
        """Return the figures of one class a sample that `Scores.of_scores` makes of logits; none without scores."""
        if not self.scores:
            return {}
        aurocs, pr_aucs, _ = self._rankings(counts)
        rows = self._by_confidence(counts) / [1, 1, _UNITS]
        ece = float(np.abs(rows[:, 1] - rows[:, 2]).sum() / max(rows[:, 0].sum(), 1))
        found = {"auroc": mean_known(aurocs), "pr_auc": mean_known(pr_aucs), "ece": ece, "reliability": rows.tolist()}
        return found | {"per_class_auroc": aurocs, "per_class_pr_auc": pr_aucs}

    def auroc_error(self, counts: IntArray) -> float:
        """Bound how far AUROC is from that of the scores themselves; NaN where it is not known."""
        return mean_known(self._rankings(counts)[2])

    def _rankings(self, counts: IntArray) -> FloatArray:
        """Return AUROC, average precision and the bound of the first's error for each class, `(3, classes)`."""
        if not self.scores:
            return np.full((3, self.classes), np.nan)
        lack, have = self._by_score(counts)[:, :, ::-1].transpose(1, 0, 2).astype(np.float64)  # likeliest first
        hits, taken = have.cumsum(axis=1), (have + lack).cumsum(axis=1)
        pairs = lack.sum(axis=1) * have.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            area = (lack * (hits - have / 2)).sum(axis=1) / pairs
            precision = (have * hits / np.maximum(taken, 1)).sum(axis=1) / have.sum(axis=1)
            error = (lack * have).sum(axis=1) / 2 / pairs
        return np.where(pairs > 0, [area, precision, error], np.nan)
