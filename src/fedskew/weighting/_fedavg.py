"""FedAvg's weights (McMahan et al. 2017): `a_k = n_k / sum n`."""

from __future__ import annotations

from typing import ClassVar

from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts, as_sizes
from fedskew.parameters import component
from fedskew.weighting._protocol import Answered, FloatArray


def fedavg(counts: CountsLike, sizes: ArrayLike | None = None) -> FloatArray:
    """Weights by the number of samples, `(clients,)`, sum 1.

    `counts`: `(clients, classes)`; `sizes`: samples of each client, `(clients,)`, where they are not the counts' row
    sums (noisy counts). Raises ArgumentError for wrong shapes or values, and where no client holds a sample.
    """
    held = as_sizes(sizes, as_counts(counts))
    total = held.sum()
    if not total > 0:
        raise ArgumentError(f"{'counts' if sizes is None else 'sizes'}: no client holds a sample")
    weights: FloatArray = held / total
    return weights


@component
class FedAvg:
    """Every update counts by the client's number of samples."""

    needs_target: ClassVar[bool] = False
    needs_label_counts: ClassVar[bool] = False
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def weigh(self, answered: Answered) -> FloatArray:
        """`fedavg` of those who answered."""
        return fedavg(answered.counts, answered.sizes)
