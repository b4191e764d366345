"""FedLA (Khalil et al., "Label-Aware Aggregation for Improved Federated Learning", FMEC 2023).

    W(k) = sum_c n_{k,c} / S_c,   S_c = sum of n_{k,c} over the participants,   a_k = W(k) / sum W

A client's weight is its share of each label, summed over labels. Proportional histograms give FedAvg's weights, and so
does a single participant. A label that one participant holds brings it a whole unit of W, even with one sample; the
paper says so. The authors' public code computes the same weights.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import component
from fedskew.weighting._protocol import Answered, FloatArray


def fedla(counts: CountsLike) -> FloatArray:
    """FedLA's weights of the participants, `(clients,)`, sum 1. `counts`: theirs alone, `(clients, classes)`.

    Raises ArgumentError for wrong shapes or values, and where no client holds a sample.
    """
    held = as_counts(counts)
    pooled = held.sum(axis=0)
    labels = np.count_nonzero(pooled)
    if not labels:
        raise ArgumentError("counts: no client holds a sample")
    shares = held @ np.divide(1 / labels, pooled, out=np.zeros_like(pooled), where=pooled > 0)
    weights: FloatArray = shares / shares.sum()
    return weights


@component
class FedLA:
    """Every update counts by the client's share of each label among those who answered."""

    needs_target: ClassVar[bool] = False
    needs_label_counts: ClassVar[bool] = True
    paper: ClassVar[str] = "Khalil et al., FMEC 2023"

    def weigh(self, answered: Answered) -> FloatArray:
        """`fedla` of those who answered."""
        return fedla(answered.counts)
