"""FedAvg's weights (McMahan et al. 2017): `a_k = n_k / sum n`."""

from typing import ClassVar

from numpy.typing import ArrayLike

from fedskew.labels import CountsLike, as_counts, as_sizes
from fedskew.parameters import FloatArray, component
from fedskew.weighting._from_sums import FromTotals
from fedskew.weighting._protocol import Answered, Facts, as_shares


def fedavg(counts: CountsLike, sizes: ArrayLike | None = None) -> FloatArray:
    """FedAvg's weights, `(clients,)`, sum 1: proportional to `sizes`, or else to the row sums of `counts`."""
    return as_shares(as_sizes(sizes, as_counts(counts)), "counts" if sizes is None else "sizes")


@component
class FedAvg(FromTotals):
    """Weights proportional to the clients' numbers of samples."""

    needs_label_counts: ClassVar[bool] = False
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def weigh(self, answered: Answered) -> FloatArray:
        """Return `fedavg` of the clients that replied."""
        return fedavg(answered.counts, answered.sizes)

    def own_weight(self, counts: FloatArray, announced: Facts) -> float:
        """Return the client's share of all samples; see `BySums.own_weight`."""
        return float(counts.sum() / announced["totals"].sum())
