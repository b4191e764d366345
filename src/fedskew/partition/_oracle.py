"""Clients that already have the target's label mix: the upper reference of the FedPALS paper.

Listo Zec et al., "Overcoming label shift with target-aware federated learning": Oracle is FedAvg on such clients. How
they are drawn is not printed. Here they are dealt from all training samples but a target client's own, as a class of
the target may have no client that holds it: each client gets its number of samples, times one factor for all, in the
target's mix by largest remainder. The factor is 1 unless some class runs short: the largest at which no sample is
needed twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.labels import as_target
from fedskew.partition._rule import IntArray, apportion, deal


def oracle(
    sizes: ArrayLike, rows: IntArray, labels: ArrayLike, target: ArrayLike, rng: np.random.Generator
) -> list[IntArray]:
    """Deal samples so that every client has the target's label mix.

    A client's counts are within one of its exact shares; where rounding asks for more of a class than there is, some
    clients get one less.

    Args:
        sizes: Number of samples of each client, shape `(clients,)`.
        rows: The samples to deal, as indices into `labels`.
        labels: Class ids of the whole data set, shape `(samples,)`.
        target: Label mix, shape `(classes,)`; normalised here.
        rng: Source of all random draws.

    Returns:
        One ascending index array per client.

    Raises:
        ArgumentError: A bad target.
        PartitionError: There is no sample of a class that the target has.
    """
    classes = np.asarray(labels)
    mix = as_target(target, np.size(target))
    pool = np.sort(rows)
    held = np.bincount(classes[pool], minlength=len(mix))
    if len(held) > len(mix):
        raise ArgumentError(f"target: has {len(mix)} classes, and class {len(held) - 1} occurs")
    missing = np.flatnonzero((held == 0) & (mix > 0))
    if len(missing):
        raise PartitionError(f"there is no training sample of class {missing[0]}, which the target has")
    before = np.asarray(sizes, dtype=np.int64)
    wanted = mix > 0
    factor = min(1.0, (held[wanted] / (mix[wanted] * before.sum())).min())
    dealt = np.floor(factor * before + 1e-9).astype(np.int64)
    counts = apportion(dealt, np.tile(mix, (len(dealt), 1)))
    rounded_up = counts - dealt[:, None] * mix
    for short in np.flatnonzero(counts.sum(axis=0) > held):
        most = np.argsort(-rounded_up[:, short], kind="stable")
        counts[most[: counts[:, short].sum() - held[short]], short] -= 1
    return [pool[own] for own in deal(classes[pool], counts, rng)]
