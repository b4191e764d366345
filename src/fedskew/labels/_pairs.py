"""Pairs of classes: how many samples let some client tell the two apart.

A loss that compares only the classes of one client (FedVLS's calibration, FedLC) learns to tell two classes apart from
clients that hold both, and from as many samples as the rarer of the two has there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedskew.labels._counts import CountsLike, FloatArray, as_counts, row_blocks

FEW_TOGETHER = 100
"""Co-location below which a pair counts as hardly learnt by such a loss."""

HARDLY_TOGETHER = 10
"""Co-location below which a pair counts as not learnt by such a loss."""

_NAMED_AT_MOST = 3


def colocation(counts: CountsLike) -> FloatArray:
    """Return how many samples of each pair of classes clients hold together: `sum_i min(n_ia, n_ib)`.

    Args:
        counts: Label counts, shape `(clients, classes)`.

    Returns:
        Shape `(classes, classes)`, symmetric; the diagonal is the class totals.

    Raises:
        ArgumentError: Wrong shape or values.
    """
    held = as_counts(counts)
    classes = held.shape[1]
    together = np.zeros((classes, classes))
    for part in row_blocks(held):
        columns = np.ascontiguousarray(held[part].T)
        for label, own in enumerate(columns):
            holders = np.flatnonzero(own)
            others = columns[label:] if len(holders) == len(own) else columns[label:, holders]
            together[label, label:] += np.minimum(own[holders], others).sum(axis=1)
    return np.maximum(together, together.T)


@dataclass(frozen=True)
class ClassPairs:
    """Which pairs of classes some client can tell apart by its own samples.

    Attributes:
        together: Their co-location, shape `(classes, classes)`; see `colocation`.
    """

    together: FloatArray

    @classmethod
    def of(cls, counts: CountsLike) -> ClassPairs:
        """Find the pairs of a federation's classes; see `colocation`.

        Args:
            counts: Label counts, `(clients, classes)`.
        """
        return cls(colocation(counts))

    @property
    def number(self) -> int:
        """Number of pairs of classes that both have a sample somewhere."""
        occur = int(np.count_nonzero(np.diagonal(self.together)))
        return occur * (occur - 1) // 2

    def under(self, samples: float) -> NDArray[np.int64]:
        """Return the pairs of classes that both occur and have a co-location below so many samples.

        Args:
            samples: The limit.

        Returns:
            Class ids, shape `(pairs, 2)`, those with the smallest co-location first.
        """
        occurs = np.diagonal(self.together) > 0
        one, other = np.nonzero(np.triu(np.outer(occurs, occurs) & (self.together < samples), 1))
        order = np.argsort(self.together[one, other], kind="stable")
        return np.stack([one, other], axis=1)[order]

    def in_words(self, class_names: tuple[str, ...]) -> str:
        """Say how many pairs are below both limits, and name the first few.

        Args:
            class_names: Names of the classes.

        Returns:
            The sentence; empty if no pair is below the lower limit.
        """
        hardly, few = self.under(HARDLY_TOGETHER), self.under(FEW_TOGETHER)
        if not len(hardly):
            return ""
        named = [f"{class_names[one]} and {class_names[other]}" for one, other in hardly[:_NAMED_AT_MOST]]
        rest = f" and {len(hardly) - len(named):,} more" if len(hardly) > len(named) else ""
        return (
            f"{len(hardly):,} of {self.number:,} pairs of classes have under {HARDLY_TOGETHER} samples together (the "
            f"smaller of a client's two counts, summed over clients), {len(few):,} under {FEW_TOGETHER}: "
            f"{'; '.join(named)}{rest}"
        )
