"""What is counted of test samples, in integers that add up over sites, and the figures that follow from their sum.

one class a sample     n_ij, samples of class i that are taken for class j                     (classes, classes)
several labels, or none    of each label n_ij, i: samples have it, j: are taken to have it     (labels, 2, 2)
                           and how many samples are right in all labels
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew import findings
from fedskew.metrics._findings import of_counts

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """What is counted, as one vector of integers: of so many classes, of which a sample may have several, or none."""

    classes: int
    several: bool = False

    @property
    def size(self) -> int:
        """How many integers there are."""
        return self._main + self.several

    @property
    def _main(self) -> int:
        return 4 * self.classes if self.several else self.classes**2

    def count(self, logits: ArrayLike, targets: ArrayLike) -> IntArray:
        """Count samples by their logits, `(samples, classes)`, and targets, `(samples,)`, class ids or bits."""
        z, y = np.asarray(logits), np.asarray(targets, dtype=np.int64)
        if not self.several:
            pairs = y * self.classes + (z.argmax(axis=1) if len(z) else y)
            return np.bincount(pairs, minlength=self.classes**2)
        truth, said = findings.as_table(y, self.classes), (z.reshape(len(y), -1) >= 0).astype(np.int64)
        cells = np.arange(self.classes) * 4 + 2 * truth + said
        return np.append(np.bincount(cells.reshape(-1), minlength=self._main), int((truth == said).all(axis=1).sum()))

    def table(self, counts: IntArray) -> IntArray:
        """Return the confusion matrix, or that of each label, `(labels, 2, 2)`."""
        shape = (self.classes, 2, 2) if self.several else (self.classes, self.classes)
        return counts[: self._main].reshape(shape)

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

    def figures(self, counts: IntArray) -> dict[str, Any]:
        """Return the figures of several labels that `finding_figures` makes of logits, as far as they follow."""
        unknown = np.full(self.classes, np.nan)
        return of_counts(self.table(counts), self.right(counts)) | {"aurocs": unknown, "pr_aucs": unknown}
