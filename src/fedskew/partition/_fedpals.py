"""FedPALS's divisions: PACS, where every client lacks a different label, and clients that have the target's mix."""

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.labels import as_target
from fedskew.parameters import IntArray, PositiveShare, component
from fedskew.partition._rule import Rule, apportion, deal


@component
class OneLabelMissing(Rule):
    """Each of K clients lacks one of the first K labels, and the first client is small.

    The split of PACS in FedPALS, as in its authors' code (Breitholtz/FedDG_Benchmark, "ImbalancedSplitter"). Client i
    of K lacks label K - 1 - i; the samples of each of the first K labels are shared evenly by the other K - 1 clients;
    all others are pooled, shuffled and dealt in K equal parts; then the first client keeps a tenth of what it has. On
    the 5,683 training images of sketch and cartoon that makes 191, 1874 and 1891 samples. The paper's text reads as if
    all samples were dealt in thirds first, which would make 156, 1533 and 1544. (The code's first two parts are 33 %.)

    Attributes:
        kept: Share of its samples that the first client keeps.
    """

    kept: PositiveShare = 0.1

    def _counts(self, class_sizes: IntArray, clients: int, rng: Generator) -> IntArray:
        classes = len(class_sizes)
        if not 2 <= clients <= classes:
            raise PartitionError(
                f"with {classes} labels, {clients} clients can't lack one each: take at least 2 and at most {classes}"
            )
        counts = np.zeros((clients, classes), dtype=np.int64)
        for label in range(clients):
            holders = np.delete(np.arange(clients), clients - 1 - label)
            part, rest = divmod(int(class_sizes[label]), clients - 1)
            counts[holders, label] = part + (np.arange(clients - 1) < rest)
        pool = rng.permutation(np.repeat(np.arange(clients, classes), class_sizes[clients:]))
        for client, dealt in enumerate(np.array_split(pool, clients)):
            counts[client] += np.bincount(dealt, minlength=classes)
        keeps = math.floor(self.kept * counts[0].sum() + 1e-9)
        counts[0] = rng.multivariate_hypergeometric(counts[0], keeps)
        return counts


def oracle(sizes: ArrayLike, rows: IntArray, labels: ArrayLike, target: ArrayLike, rng: Generator) -> list[IntArray]:
    """Deal samples so that every client has the target's label mix: the upper reference of the FedPALS paper.

    Listo Zec et al., "Overcoming label shift with target-aware federated learning": Oracle is FedAvg on such clients.
    How they are drawn is not printed. Here they are dealt from all training samples but a target client's own, as a
    class of the target may have no client that holds it: each client gets its number of samples, times one factor for
    all, in the target's mix by largest remainder. The factor is 1 unless some class runs short: the largest at which no
    sample is needed twice. A client's counts are within one of its exact shares; where rounding asks for more of a
    class than there is, some clients get one less.

    Args:
        sizes: Number of samples of each client, shape `(clients,)`.
        rows: The samples to deal, as indices into `labels`.
        labels: Class ids of the whole data set, shape `(samples,)`.
        target: Label mix, shape `(classes,)`; normalised here.

    Returns:
        One ascending index array per client.
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
