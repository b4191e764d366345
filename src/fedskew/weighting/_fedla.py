"""FedLA (Khalil et al., "Label-Aware Aggregation for Improved Federated Learning", FMEC 2023).

    W(k) = sum_c n_{k,c} / S_c,   S_c = sum of n_{k,c} over the participants,   a_k = W(k) / sum W

A client's weight is its share of each label, summed over labels. Proportional histograms give FedAvg's weights, and so
does a single participant. A label that only one participant holds adds 1 to its W, even with a single sample, as the
paper says. The authors' public code computes the same weights.
"""

from typing import ClassVar

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import FloatArray, component
from fedskew.weighting._from_sums import FromTotals, checked
from fedskew.weighting._protocol import Answered, Facts, as_shares


def fedla(counts: CountsLike) -> FloatArray:
    """FedLA's weights, `(clients,)`, sum 1, of label counts, `(clients, classes)`."""
    held = as_counts(counts)
    pooled = held.sum(axis=0)
    labels = np.count_nonzero(pooled)
    if not labels:
        raise ArgumentError("counts: no client holds a sample")
    return as_shares(held @ np.divide(1 / labels, pooled, out=np.zeros_like(pooled), where=pooled > 0), "counts")


@component
class FedLA(FromTotals):
    """Weights proportional to a client's share of each label among the clients that replied, summed over labels."""

    needs_label_counts: ClassVar[bool] = True
    weighs_everyone: ClassVar[bool] = True
    sums_labels: ClassVar[bool] = True
    paper: ClassVar[str] = "Khalil et al., FMEC 2023"

    def weigh(self, answered: Answered) -> FloatArray:
        """Return `fedla` of the clients that replied."""
        return fedla(answered.counts)

    def own_weight(self, counts: FloatArray, announced: Facts) -> float:
        """Return the mean over the labels of the client's share of each, at most 1; see `BySums.own_weight`."""
        own = checked(counts)
        totals = np.maximum(announced["totals"], own)  # an error would tell a server that lies what the client holds
        shares = np.divide(own, totals, out=np.zeros_like(own), where=totals > 0)
        return float(shares.sum()) / np.count_nonzero(totals)
