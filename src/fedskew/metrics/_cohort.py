"""What labels a cohort trains on."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, LabelCounts, as_counts, as_target, entropy


def cohort_entropy(counts: CountsLike) -> float:
    """The entropy, in bits, of the clients' summed label counts, `(clients, classes)`."""
    return float(entropy(as_counts(counts).sum(axis=0)))


def mix_distance(weights: ArrayLike, counts: CountsLike, target: ArrayLike) -> float:
    """The squared distance of the effective label mix, the weighted mean of the clients' marginals, from the target.

    `weights`: `(clients,)`, as they are used, sum 1; `counts`: `(clients, classes)`, an empty client's marginals are 0;
    `target`: `(classes,)`, normalised here. What FedPALS minimises at strength 0.
    """
    marginals = LabelCounts(as_counts(counts)).marginals
    shares = np.asarray(weights, dtype=np.float64)
    if shares.shape != (len(marginals),) or not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise ArgumentError(f"weights: must be {len(marginals)} finite numbers, none below 0, one per client of counts")
    gap = shares @ marginals - as_target(target, marginals.shape[1])
    return float(gap @ gap)
