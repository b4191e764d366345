"""The parts of the skew report, and how each is computed.

FedLA names three properties of a federation's labels: label distribution, client distribution consistency, and
inter-client distribution. Its paper gives no formulas; those here are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.labels._counts import CountsLike, FloatArray, LabelCounts, as_counts, as_target, row_blocks
from fedskew.labels._measures import entropy
from fedskew.mixing import Programme

Pairs: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]

EXACT_PAIRS = 500_000
"""Up to this many pairs of clients a mean over pairs is exact; beyond, it is over a sample."""

SAMPLED_PAIRS = 200_000
DRAWS_SEED = 20230
PAIRS_AT_ONCE = 10_000


@dataclass(frozen=True)
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

    histogram: FloatArray
    richness: int
    entropy: float
    evenness: float
    client_richness: NDArray[np.int64]
    client_evenness: FloatArray
    skew: float
    skew_by_chance: float
    cohort_entropy: float


@dataclass(frozen=True)
class ClientConsistency:
    """FedLA's second property: do clients have equally uneven mixes, whichever labels they hold?

    Means over pairs of clients with samples, between their mixes sorted from the largest share to the smallest; NaN
    where there is no pair.

    Attributes:
        hellinger: Hellinger distance sqrt(1 - sum sqrt(p q)), from 0 to 1.
        emd: Earth mover's distance in ranks, sum |P - Q| of the cumulated shares, from 0 to (classes - 1) / 2; always
            exact.
        pairs: Number of pairs in the Hellinger mean.
        sampled: Whether they are a sample of all pairs.
    """

    hellinger: float
    emd: float
    pairs: int
    sampled: bool


@dataclass(frozen=True)
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

    shared: float
    jaccard: float
    pairs: int
    sampled: bool
    holders: NDArray[np.int64]
    largest_holding: FloatArray


@dataclass(frozen=True)
class QuantitySkew:
    """How unevenly samples are spread over clients, whatever their labels.

    Attributes:
        smallest: Samples of the smallest client; `median`, `mean` and `largest` likewise.
        variation: Standard deviation of the client sizes over their mean.
        gini: Gini coefficient: 0 where all sizes are equal, near 1 where one client holds all samples.
        largest_tenth: Share of all samples at the largest tenth of the clients (at least one).
        empty: Number of clients without samples.
    """

    smallest: float
    median: float
    mean: float
    largest: float
    variation: float
    gini: float
    largest_tenth: float
    empty: int


@dataclass(frozen=True)
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
        unheld: Ids of the target's classes that no client holds.
    """

    mix: FloatArray
    nearest: FloatArray
    distance: float
    fedavg_distance: float
    covered: float
    short: FloatArray
    unheld: NDArray[np.int64]

    @property
    def ceiling(self) -> float:
        """The share of the target's mix whose classes some client holds; the others are never learned."""
        return 1.0 - float(self.mix[self.unheld].sum())


def label_distribution(record: LabelCounts, client_bits: FloatArray) -> LabelDistribution:
    """FedLA's first property; `client_bits`: each client's entropy."""
    pooled, sizes = record.pooled, record.sizes
    classes, samples = len(pooled), float(sizes.sum())
    bits = float(entropy(pooled))
    most = math.log2(classes) if classes > 1 else 1.0
    information = max(bits - float(sizes @ client_bits) / samples, 0.0)
    # For a random division the information is chi-square to first order: (clients - 1)(labels - 1) / (2 n ln 2) bits.
    freedom = (np.count_nonzero(sizes) - 1) * (np.count_nonzero(pooled) - 1)
    chance = freedom / (2 * samples * math.log(2))
    return LabelDistribution(
        histogram=pooled / samples,
        richness=int(np.count_nonzero(pooled)),
        entropy=bits,
        evenness=bits / most,
        client_richness=np.count_nonzero(record.counts, axis=1),
        client_evenness=client_bits / most,
        skew=min(information / bits, 1.0) if bits else 0.0,
        skew_by_chance=min(chance / bits, 1.0) if bits else 0.0,
        cohort_entropy=_cohort_entropy(record),
    )


def _cohort_entropy(record: LabelCounts) -> float:
    clients = len(record)
    if clients < 10:
        return math.nan
    rng = np.random.Generator(np.random.Philox(DRAWS_SEED))
    cohorts = max(10, min(500, 100_000 // (clients // 10)))
    drawn = [record.counts[rng.choice(clients, clients // 10, replace=False)].sum(axis=0) for _ in range(cohorts)]
    return float(np.mean(entropy(np.array(drawn))))


def client_consistency(
    record: LabelCounts, present: NDArray[np.int64], pairs: Pairs, sampled: bool
) -> ClientConsistency:
    """FedLA's second property, over pairs of the clients with samples, `present`."""
    clients, drawn = len(present), len(pairs[0])
    if clients < 2:
        return ClientConsistency(math.nan, math.nan, 0, False)
    counts, (members, among) = record.counts, _members(pairs)
    roots = np.empty((len(members), counts.shape[1]))
    for part in row_blocks(roots):
        np.sqrt(_sorted_mixes(counts[present[members[part]]]), out=roots[part])
    overlap = _over_pairs(among, lambda one, other: np.einsum("ij,ij->i", roots[one], roots[other]))
    hellinger = float(np.sqrt(np.maximum(1 - overlap, 0)).mean())
    cumulated = np.empty((counts.shape[1], clients))
    for part in row_blocks(counts):
        cumulated[:, part] = np.cumsum(_sorted_mixes(counts[present[part]]), axis=1).T
    # The mean of |x_i - x_j| over pairs follows from the sorted x: the k-th smallest is the larger of k pairs.
    signs = 2 * np.arange(clients) - clients + 1
    emd = float(sum(signs @ np.sort(shares) for shares in cumulated) / (clients * (clients - 1) / 2))
    return ClientConsistency(hellinger, max(emd, 0.0), drawn, sampled)


def _sorted_mixes(rows: FloatArray) -> FloatArray:
    """Label mixes of the clients with samples, each sorted from its largest share to its smallest."""
    mixes: FloatArray = np.sort(rows, axis=1)[:, ::-1] / rows.sum(axis=1, keepdims=True)
    return mixes


def inter_client_distribution(
    record: LabelCounts, present: NDArray[np.int64], pairs: Pairs, sampled: bool
) -> InterClientDistribution:
    """FedLA's third property, over pairs of the clients with samples, `present`."""
    counts, sizes, pooled = record.counts, record.sizes, record.pooled
    holders = np.count_nonzero(counts, axis=0)
    shared = float(((counts @ (holders > 1).astype(np.float64))[present] / sizes[present]).mean())
    jaccard = math.nan
    if len(present) > 1:
        members, among = _members(pairs)
        held = counts[present[members]] > 0

        def similarity(one: NDArray[np.int64], other: NDArray[np.int64]) -> FloatArray:
            both = np.count_nonzero(held[one] & held[other], axis=1)
            either: FloatArray = both / np.count_nonzero(held[one] | held[other], axis=1)
            return either

        jaccard = float(_over_pairs(among, similarity).mean())
    largest = np.divide(counts.max(axis=0), pooled, out=np.zeros_like(pooled), where=pooled > 0)
    return InterClientDistribution(shared, jaccard, len(pairs[0]), sampled, holders, largest)


def quantity_skew(sizes: FloatArray) -> QuantitySkew:
    """Return how unevenly these client sizes are spread."""
    clients, mean = len(sizes), float(sizes.mean())
    ordered = np.sort(sizes)
    ranks = 2 * np.arange(1, clients + 1) - clients - 1
    return QuantitySkew(
        smallest=float(ordered[0]),
        median=float(np.median(ordered)),
        mean=mean,
        largest=float(ordered[-1]),
        variation=float(sizes.std()) / mean,
        gini=float(ranks @ ordered) / (clients * float(ordered.sum())),
        largest_tenth=float(ordered[-max(1, clients // 10) :].sum() / ordered.sum()),
        empty=int(np.count_nonzero(sizes == 0)),
    )


def target_coverage(record: LabelCounts, target: ArrayLike) -> TargetCoverage:
    """Return how near the clients come to a target mix."""
    mix = as_target(target, record.counts.shape[1])
    residual = Programme(record.counts, mix).projection.residual
    # A difference up to rounding is not a shortage.
    short = np.where(residual > 1e-9, residual, 0.0)
    histogram = record.pooled / record.pooled.sum()
    nearest = np.maximum(mix - residual, 0.0)
    return TargetCoverage(
        mix=mix,
        nearest=nearest,
        distance=float(residual @ residual),
        fedavg_distance=float((mix - histogram) @ (mix - histogram)),
        covered=float(np.minimum(mix, nearest).sum()),
        short=short,
        unheld=unheld_classes(record, mix),
    )


def unheld_classes(counts: CountsLike, target: ArrayLike) -> NDArray[np.int64]:
    """Return the ids of a target's classes that no client holds: no method can learn them."""
    held = as_counts(counts)
    return np.flatnonzero((as_target(target, held.shape[1]) > 0) & ~(held > 0).any(axis=0))


def client_pairs(clients: int) -> tuple[Pairs, bool]:
    """Return all pairs of different clients, or a fixed sample of many pairs; and whether they are a sample."""
    if clients * (clients - 1) // 2 <= EXACT_PAIRS:
        one, other = np.triu_indices(clients, 1)
        return (one, other), False
    rng = np.random.Generator(np.random.Philox(DRAWS_SEED))
    first = rng.integers(clients, size=SAMPLED_PAIRS)
    return (first, (first + rng.integers(1, clients, size=SAMPLED_PAIRS)) % clients), True


def _members(pairs: Pairs) -> tuple[NDArray[np.int64], Pairs]:
    """Return the clients that occur in a pair, and the pairs as positions among them."""
    members, places = np.unique(np.stack(pairs), return_inverse=True)
    one, other = places.reshape(2, -1)
    return members, (one, other)


def _over_pairs(pairs: Pairs, measure: Callable[[NDArray[np.int64], NDArray[np.int64]], FloatArray]) -> FloatArray:
    """Return a measure of each pair, block by block: memory does not grow with pairs times classes."""
    one, other = pairs
    blocks = range(0, len(one), PAIRS_AT_ONCE)
    return np.concatenate([measure(one[at : at + PAIRS_AT_ONCE], other[at : at + PAIRS_AT_ONCE]) for at in blocks])
