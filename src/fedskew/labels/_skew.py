"""What a federation's label counts say about its skew.

FedLA names three properties of a federation's labels: label distribution, client distribution consistency, and
inter-client distribution. Its paper gives no formulas; those here are ours, and each is written where it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels._counts import CountsLike, FloatArray, LabelCounts, as_target, row_blocks
from fedskew.labels._measures import GROUPS, class_group_matrix, entropy
from fedskew.mixing import Programme

Pairs: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]

EXACT_PAIRS = 500_000
"""Up to so many pairs of clients a mean over pairs is exact; beyond, it is over a sample."""

SAMPLED_PAIRS = 200_000
DRAWS_SEED = 20230
PAIRS_AT_ONCE = 10_000
RARE = 0.2
"""A class is rare where its share of all samples is below this part of an even share."""


@dataclass(frozen=True)
class LabelDistribution:
    """FedLA's first property: how many labels there are, and how evenly.

    `histogram`: share of each class in all samples, `(classes,)`. `richness`: classes with a sample. `entropy`: bits of
    the histogram; `evenness`: that divided by log2(classes). `client_richness` and `client_evenness`: the same of each
    client, `(clients,)`, 0 for an empty one. `skew`: mutual information of client and label divided by the histogram's
    entropy: 0 where all clients have the same mix, 1 where the client tells the label; `skew_by_chance`: what a random
    division of as many samples would show on average (to first order). `cohort_entropy`: bits of the pooled samples of
    a random tenth of the clients, mean over cohorts drawn with a fixed generator; NaN where there are fewer than ten
    clients.
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

    Mean over pairs of clients with samples, between their mixes sorted from the largest share to the smallest.
    `hellinger`: sqrt(1 - sum sqrt(p q)), from 0 to 1. `emd`: earth mover's distance in ranks, sum |P - Q| of the
    cumulated shares, from 0 to (classes - 1) / 2; always exact. NaN where there is no pair. `pairs`: how many the
    Hellinger mean is over; `sampled`: whether they are a sample of all pairs.
    """

    hellinger: float
    emd: float
    pairs: int
    sampled: bool


@dataclass(frozen=True)
class InterClientDistribution:
    """FedLA's third property: do clients hold the same labels?

    `shared`: share of a client's samples whose label another client holds too, mean over clients with samples.
    `jaccard`: labels that two clients both hold over labels that either holds, mean over pairs of them (NaN without a
    pair; `pairs` and `sampled` as in `ClientConsistency`). `holders`: clients that hold each class, `(classes,)`;
    `largest_holding`: share of a class's samples at the client with most of them, 0 where nobody has any.
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

    `variation`: standard deviation over mean of the sizes; `gini`: 0 where all are equal, near 1 where one has all;
    `largest_tenth`: share of all samples at the largest tenth of the clients (one at least); `empty`: clients without
    any.
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

    `mix`: the target, `(classes,)`. `distance`: squared distance to the nearest mix that weighted clients can have
    (FedPALS's d(T, S)), `nearest` that mix; `fedavg_distance`: squared distance to FedAvg's, the histogram. `covered`:
    sum of min(target, nearest), the share of the target that weights can give. `short`: target minus nearest where that
    is positive.
    """

    mix: FloatArray
    nearest: FloatArray
    distance: float
    fedavg_distance: float
    covered: float
    short: FloatArray


@dataclass(frozen=True)
class SkewReport:
    """What `describe` found. `print` it for a page to read; `to_dict` gives plain values for machines.

    `groups`: each class's group at each client, `(clients, classes)`, 0 vacant, 1 minority, 2 majority (of a client's
    samples / classes). `kl_to_uniform`: bits, `(clients,)`. `target` is None where none was given.
    """

    counts: LabelCounts = field(repr=False)
    label_distribution: LabelDistribution
    client_consistency: ClientConsistency
    inter_client: InterClientDistribution
    quantity: QuantitySkew
    groups: NDArray[np.int8] = field(repr=False)
    kl_to_uniform: FloatArray = field(repr=False)
    target: TargetCoverage | None = None

    @property
    def rare(self) -> NDArray[np.int64]:
        """Classes that somebody holds, but whose share of all samples is below a fifth of an even share."""
        histogram = self.label_distribution.histogram
        return np.flatnonzero((histogram > 0) & (histogram < RARE / len(histogram)))

    @property
    def single_holder(self) -> NDArray[np.int64]:
        """Classes that one client alone holds, where there are several clients."""
        return np.flatnonzero(self.inter_client.holders == 1) if len(self.counts) > 1 else np.zeros(0, np.int64)

    @property
    def absent(self) -> NDArray[np.int64]:
        """Classes that no client holds."""
        return np.flatnonzero(self.inter_client.holders == 0)

    def group_sizes(self) -> dict[str, NDArray[np.int64]]:
        """How many vacant, minority and majority classes each client has, `(clients,)` each."""
        return {name: np.count_nonzero(self.groups == group, axis=1) for group, name in enumerate(GROUPS)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `json.dumps` takes; a figure that does not exist is None. Clients and classes by name."""
        clients, classes = self.counts.clients, self.counts.classes
        names = np.array(classes, dtype=object)
        sizes = self.counts.sizes.tolist()
        figures = self.label_distribution
        report: dict[str, Any] = {
            "clients": len(clients),
            "classes": list(classes),
            "samples": float(self.counts.counts.sum()),
            "label_distribution": {
                "histogram": dict(zip(classes, figures.histogram.tolist(), strict=True)),
                "richness": figures.richness,
                "entropy": figures.entropy,
                "evenness": figures.evenness,
                "skew": figures.skew,
                "skew_by_chance": figures.skew_by_chance,
                "cohort_entropy": _or_none(figures.cohort_entropy),
            },
            "client_consistency": _plain(self.client_consistency),
            "inter_client": _plain(self.inter_client)
            | {
                "holders": dict(zip(classes, self.inter_client.holders.tolist(), strict=True)),
                "largest_holding": dict(zip(classes, self.inter_client.largest_holding.tolist(), strict=True)),
            },
            "quantity": _plain(self.quantity),
            "rare": names[self.rare].tolist(),
            "single_holder": names[self.single_holder].tolist(),
            "absent": names[self.absent].tolist(),
            "by_client": {
                client: {
                    "samples": sizes[row],
                    "richness": int(figures.client_richness[row]),
                    "evenness": float(figures.client_evenness[row]),
                    "kl_to_uniform": float(self.kl_to_uniform[row]),
                    **{name: names[self.groups[row] == group].tolist() for group, name in enumerate(GROUPS)},
                }
                for row, client in enumerate(clients)
            },
            "target": None,
        }
        if self.target is not None:
            found = self.target
            report["target"] = {
                "distance": found.distance,
                "fedavg_distance": found.fedavg_distance,
                "covered": found.covered,
                "mix": dict(zip(classes, found.mix.tolist(), strict=True)),
                "nearest": dict(zip(classes, found.nearest.tolist(), strict=True)),
                "short": {classes[label]: float(found.short[label]) for label in np.flatnonzero(found.short)},
            }
        return report

    def __str__(self) -> str:
        from fedskew.labels._sentences import page

        return page(self)


def describe(counts: CountsLike, target: ArrayLike | None = None) -> SkewReport:
    """Describe a federation's labels: FedLA's three properties, quantity skew, groups, and coverage of a target.

    `counts`: `(clients, classes)`; `target`: a label mix, `(classes,)`, normalised. Needs no matrix of clients by
    clients: means over pairs are exact by algebra, or up to 500,000 pairs, else over 200,000 pairs drawn with a fixed
    generator, and the report says so. Raises ArgumentError for wrong shapes or values, and where no client holds a
    sample.
    """
    record = counts if isinstance(counts, LabelCounts) else LabelCounts(counts)
    if not record.counts.max() > 0:
        raise ArgumentError("counts: no client holds a sample")
    present = np.flatnonzero(record.sizes)
    pairs, sampled = _pairs(len(present))
    bits = np.asarray(entropy(record))
    return SkewReport(
        counts=record,
        label_distribution=_label_distribution(record, bits),
        client_consistency=_client_consistency(record, present, pairs, sampled),
        inter_client=_inter_client(record, present, pairs, sampled),
        quantity=_quantity(record.sizes),
        groups=class_group_matrix(record),
        kl_to_uniform=np.maximum(math.log2(record.counts.shape[1]) - bits, 0.0),
        target=None if target is None else _coverage(record, target),
    )


def _label_distribution(record: LabelCounts, client_bits: FloatArray) -> LabelDistribution:
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


def _client_consistency(
    record: LabelCounts, present: NDArray[np.int64], pairs: Pairs, sampled: bool
) -> ClientConsistency:
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
    """The mixes of clients with samples, from each one's largest share to its smallest."""
    mixes: FloatArray = np.sort(rows, axis=1)[:, ::-1] / rows.sum(axis=1, keepdims=True)
    return mixes


def _inter_client(
    record: LabelCounts, present: NDArray[np.int64], pairs: Pairs, sampled: bool
) -> InterClientDistribution:
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


def _quantity(sizes: FloatArray) -> QuantitySkew:
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


def _coverage(record: LabelCounts, target: ArrayLike) -> TargetCoverage:
    mix = as_target(target, record.counts.shape[1])
    residual = Programme(record.counts, mix).projection.residual
    # What is left by rounding is not a shortage.
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
    )


def _pairs(clients: int) -> tuple[Pairs, bool]:
    """Pairs of different clients: all of them, or a fixed sample where they are many; and whether it is a sample."""
    if clients * (clients - 1) // 2 <= EXACT_PAIRS:
        one, other = np.triu_indices(clients, 1)
        return (one, other), False
    rng = np.random.Generator(np.random.Philox(DRAWS_SEED))
    first = rng.integers(clients, size=SAMPLED_PAIRS)
    return (first, (first + rng.integers(1, clients, size=SAMPLED_PAIRS)) % clients), True


def _members(pairs: Pairs) -> tuple[NDArray[np.int64], Pairs]:
    """Those who are in a pair, and the pairs as places among them."""
    members, places = np.unique(np.stack(pairs), return_inverse=True)
    one, other = places.reshape(2, -1)
    return members, (one, other)


def _over_pairs(pairs: Pairs, measure: Callable[[NDArray[np.int64], NDArray[np.int64]], FloatArray]) -> FloatArray:
    """A measure of each pair, block by block, so that memory does not grow with the pairs times the classes."""
    one, other = pairs
    blocks = range(0, len(one), PAIRS_AT_ONCE)
    return np.concatenate([measure(one[at : at + PAIRS_AT_ONCE], other[at : at + PAIRS_AT_ONCE]) for at in blocks])


def _plain(figures: ClientConsistency | InterClientDistribution | QuantitySkew) -> dict[str, Any]:
    """The numbers of a part of the report; NaN, a figure that does not exist, as None."""
    values = {entry.name: getattr(figures, entry.name) for entry in fields(figures)}
    numbers = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
    return {name: _or_none(value) if isinstance(value, float) else value for name, value in numbers.items()}


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
