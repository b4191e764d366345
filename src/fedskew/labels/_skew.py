"""The parts of the skew report, and how each is computed.

FedLA names three properties of a federation's labels: label distribution, client distribution consistency, and
inter-client distribution. Its paper gives no formulas; those here are ours.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.labels._counts import FloatArray, LabelCounts, as_target, row_blocks
from fedskew.labels._measures import entropy
from fedskew.mixing import Programme

EXACT_PAIRS = 500_000
"""Up to this many pairs of clients a mean over pairs is exact; beyond, it is over a sample."""

SAMPLED_PAIRS = 200_000
DRAWS_SEED = 20230
PAIRS_AT_ONCE = 10_000


class LabelDistribution:
    """FedLA's first property: how many labels there are, and how evenly they occur.

    Attributes:
        histogram: Share of each class in all samples, shape `(classes,)`.
        richness: Number of classes with a sample; `client_richness` is that of each client, `(clients,)`.
        entropy: Entropy of the histogram in bits.
        evenness: That entropy divided by log2(classes); `client_evenness` is that of each client, 0 for an empty one.
        skew: Mutual information of client and label divided by the histogram's entropy: 0 where all clients have the
            same mix, 1 where the client determines the label.
        skew_by_chance: Skew of a random division of as many samples, on average and to first order.
        cohort_entropy: Entropy in bits of the pooled samples of a random tenth of the clients, mean over cohorts drawn
            with a fixed generator; NaN for fewer than ten clients.
    """

    def __init__(self, record: LabelCounts, client_bits: FloatArray) -> None:
        pooled, sizes = record.pooled, record.counts.sum(axis=1)
        classes, samples = len(pooled), float(sizes.sum())
        self.histogram = pooled / samples
        self.richness = int(np.count_nonzero(pooled))
        self.entropy = bits = float(entropy(pooled))
        most = math.log2(classes) if classes > 1 else 1.0
        self.evenness = bits / most
        self.client_richness = np.count_nonzero(record.counts, axis=1)
        self.client_evenness = client_bits / most
        information = max(bits - float(sizes @ client_bits) / samples, 0.0)
        # In a random division it is chi-square to first order: (clients - 1)(labels - 1) / (2 n ln 2) bits.
        freedom = (np.count_nonzero(sizes) - 1) * (self.richness - 1)
        chance = float(freedom / (2 * samples * math.log(2)))
        self.skew = min(information / bits, 1.0) if bits else 0.0
        self.skew_by_chance = min(chance / bits, 1.0) if bits else 0.0
        self.cohort_entropy = _cohort_entropy(record)


def _cohort_entropy(record: LabelCounts) -> float:
    clients = len(record)
    if clients < 10:
        return math.nan
    rng = np.random.Generator(np.random.Philox(DRAWS_SEED))
    cohorts = max(10, min(500, 100_000 // (clients // 10)))
    drawn = [record.counts[rng.choice(clients, clients // 10, replace=False)].sum(axis=0) for _ in range(cohorts)]
    return float(np.mean(entropy(np.array(drawn))))


class ClientPairs:
    """All pairs of clients with samples, or a fixed sample of many: places among the clients that occur in one."""

    def __init__(self, record: LabelCounts) -> None:
        present = np.flatnonzero(record.counts.any(axis=1))
        clients = len(present)
        self.sampled = clients * (clients - 1) // 2 > EXACT_PAIRS
        one, other = (np.zeros(0, np.int64),) * 2 if self.sampled else np.triu_indices(clients, 1)
        if self.sampled:
            rng = np.random.Generator(np.random.Philox(DRAWS_SEED))
            one = rng.integers(clients, size=SAMPLED_PAIRS)
            other = (one + rng.integers(1, clients, size=SAMPLED_PAIRS)) % clients
        members, places = np.unique(np.stack([one, other]), return_inverse=True)
        self.one, self.other = places.reshape(2, -1)
        self.counts = record.counts[present[members]]

    def __len__(self) -> int:
        return len(self.one)

    def mean(self, measure: Callable[[NDArray[np.int64], NDArray[np.int64]], FloatArray]) -> float:
        """Return the mean of a measure over pairs, block by block: memory does not grow with pairs times classes."""
        blocks = [slice(at, at + PAIRS_AT_ONCE) for at in range(0, len(self), PAIRS_AT_ONCE)]
        found = [measure(self.one[block], self.other[block]) for block in blocks]
        return float(np.concatenate(found).mean()) if found else math.nan


class ClientConsistency:
    """FedLA's second property: do clients have equally uneven mixes, whichever labels they hold?

    Means over pairs of clients with samples, between their mixes sorted from the largest share to the smallest; NaN
    where there is no pair.

    Attributes:
        hellinger: Hellinger distance sqrt(1 - sum sqrt(p q)), from 0 to 1.
        emd: Earth mover's distance in ranks, sum |P - Q| of cumulated shares, from 0 to (classes - 1) / 2; exact.
        pairs: Number of pairs in the Hellinger mean.
        sampled: Whether they are a sample of all pairs.
    """

    def __init__(self, record: LabelCounts, pairs: ClientPairs) -> None:
        roots = np.empty(pairs.counts.shape)
        for part in row_blocks(roots):
            np.sqrt(_sorted_mixes(pairs.counts[part]), out=roots[part])

        def distance(one: NDArray[np.int64], other: NDArray[np.int64]) -> FloatArray:
            apart: FloatArray = np.sqrt(np.maximum(1 - np.einsum("ij,ij->i", roots[one], roots[other]), 0))
            return apart

        self.hellinger = pairs.mean(distance)
        self.emd = _mean_earth_movers_distance(record.counts[record.counts.any(axis=1)])
        self.pairs, self.sampled = len(pairs), pairs.sampled


def _mean_earth_movers_distance(counts: FloatArray) -> float:
    clients, classes = counts.shape
    if clients < 2:
        return math.nan
    cumulated = np.empty((classes, clients))
    for part in row_blocks(counts):
        cumulated[:, part] = np.cumsum(_sorted_mixes(counts[part]), axis=1).T
    # The mean of |x_i - x_j| over pairs follows from the sorted x: the k-th smallest is the larger of k pairs.
    signs = 2 * np.arange(clients) - clients + 1
    emd = float(sum(signs @ np.sort(shares) for shares in cumulated) / (clients * (clients - 1) / 2))
    return max(emd, 0.0)


def _sorted_mixes(rows: FloatArray) -> FloatArray:
    """Label mixes of the clients with samples, each sorted from its largest share to its smallest."""
    mixes: FloatArray = np.sort(rows, axis=1)[:, ::-1] / rows.sum(axis=1, keepdims=True)
    return mixes


class InterClientDistribution:
    """FedLA's third property: do clients hold the same labels?

    Attributes:
        shared: Share of a client's samples whose label another client holds too, mean over clients with samples.
        jaccard: Labels that two clients both hold over labels that either holds, mean over pairs; NaN without a pair.
        pairs: Number of pairs in the Jaccard mean.
        sampled: Whether they are a sample of all pairs.
        holders: Number of clients that hold each class, shape `(classes,)`.
        largest_holding: Share of a class's samples at the client with most of them, shape `(classes,)`; 0 for a class
            without samples.
    """

    def __init__(self, record: LabelCounts, pairs: ClientPairs) -> None:
        counts, sizes, pooled = record.counts, record.counts.sum(axis=1), record.pooled
        self.holders = np.count_nonzero(counts, axis=0)
        elsewhere = counts @ (self.holders > 1).astype(np.float64)
        self.shared = float((elsewhere[sizes > 0] / sizes[sizes > 0]).mean())
        held = pairs.counts > 0

        def similarity(one: NDArray[np.int64], other: NDArray[np.int64]) -> FloatArray:
            both = np.count_nonzero(held[one] & held[other], axis=1)
            either: FloatArray = both / np.count_nonzero(held[one] | held[other], axis=1)
            return either

        self.jaccard = pairs.mean(similarity)
        self.pairs, self.sampled = len(pairs), pairs.sampled
        self.largest_holding = np.divide(counts.max(axis=0), pooled, out=np.zeros_like(pooled), where=pooled > 0)


class QuantitySkew:
    """How unevenly samples are spread over clients, whatever their labels.

    Attributes:
        smallest: Samples of the smallest client; `median`, `mean` and `largest` likewise.
        variation: Standard deviation of the client sizes over their mean.
        gini: Gini coefficient: 0 where all sizes are equal, near 1 where one client holds all samples.
        largest_tenth: Share of all samples at the largest tenth of the clients (at least one).
    """

    def __init__(self, sizes: FloatArray) -> None:
        clients, ordered = len(sizes), np.sort(sizes)
        ranks = 2 * np.arange(1, clients + 1) - clients - 1
        self.smallest, self.largest = float(ordered[0]), float(ordered[-1])
        self.median, self.mean = float(np.median(ordered)), float(sizes.mean())
        self.variation = float(sizes.std()) / self.mean
        self.gini = float(ranks @ ordered) / (clients * float(ordered.sum()))
        self.largest_tenth = float(ordered[-max(1, clients // 10) :].sum() / ordered.sum())
        self.empty = int(np.count_nonzero(sizes == 0))


class TargetCoverage:
    """How near the federation can come to a target label mix by weighing clients.

    Attributes:
        mix: The target, shape `(classes,)`.
        nearest: The mix of the least squared distance that weighted clients can have, shape `(classes,)`.
        distance: Squared distance between the two (FedPALS's d(T, S)).
        fedavg_distance: Squared distance of the target to FedAvg's mix, the histogram.
        covered: Sum of min(target, nearest): what the nearest mix has in common with the target. Not the most that
            weights can have in common with it: another mix, at a larger distance, may have more.
        short: Target minus nearest where that is positive, shape `(classes,)`.
        unheld: Ids of the target's classes that no client holds: no method can learn them.
        ceiling: The share of the target's mix whose classes some client holds.
    """

    def __init__(self, record: LabelCounts, target: ArrayLike) -> None:
        self.mix = mix = as_target(target, record.counts.shape[1])
        residual = Programme(record.counts, mix).projection.residual
        apart = mix - record.pooled / record.pooled.sum()
        self.nearest = np.maximum(mix - residual, 0.0)
        self.distance = float(residual @ residual)
        self.fedavg_distance = float(apart @ apart)
        self.covered = float(np.minimum(mix, self.nearest).sum())
        self.short = np.where(residual > 1e-9, residual, 0.0)  # a difference up to rounding is none
        self.unheld = np.flatnonzero((mix > 0) & (record.pooled == 0))
        self.ceiling = 1.0 - float(mix[self.unheld].sum())
