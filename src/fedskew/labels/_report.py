"""The skew report: what the labels look like, what it means for training, and which methods look at it.

It says of a method only what follows from its formula; what each gained in simulations `fedskew.arena` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError
from fedskew.labels._counts import CountsLike, LabelCounts, as_counts, as_target
from fedskew.labels._measures import GROUPS, ClassPairs, class_group_matrix, entropy
from fedskew.labels._skew import (
    ClientConsistency,
    ClientPairs,
    InterClientDistribution,
    LabelDistribution,
    QuantitySkew,
    TargetCoverage,
)
from fedskew.tables import amount, counted

RARE = 0.2
"""A class is rare where its share of all samples is below this part of an even share."""

NAMED_AT_MOST = 6
"""Classes that a sentence names."""

STRONG, CLEAR = 0.4, 0.1
"""Skew from which it is called strong, or clear."""

EVEN_ENOUGH = 0.95
"""Below this part of the entropy of all clients, that of a random cohort is worth a sentence."""


class SkewReport:
    """The result of `describe`: `print` it as a page to read, or take plain values from `to_dict`.

    Attributes:
        counts: The label counts described.
        label_distribution: FedLA's first property.
        client_consistency: FedLA's second property.
        inter_client: FedLA's third property.
        quantity: How unevenly samples are spread over clients.
        groups: Group of each class at each client, shape `(clients, classes)`; see `class_group_matrix`.
        kl_to_uniform: Divergence of each client's mix from the uniform one in bits, shape `(clients,)`.
        pairs: Which pairs of classes some client can tell apart.
        target: How near weighted clients come to the target mix; None where none was given.
        rare: Ids of classes that occur, but whose share of all samples is below a fifth of an even share.
        single_holder: Ids of classes that only one client holds; empty if there is only one client.
        absent: Ids of classes that no client holds.
    """

    def __init__(self, counts: LabelCounts, target: ArrayLike | None = None) -> None:
        bits, pairs = np.asarray(entropy(counts)), ClientPairs(counts)
        self.counts = counts
        self.label_distribution = LabelDistribution(counts, bits)
        self.client_consistency = ClientConsistency(counts, pairs)
        self.inter_client = InterClientDistribution(counts, pairs)
        self.quantity = QuantitySkew(counts.sizes)
        self.groups = class_group_matrix(counts)
        self.kl_to_uniform = np.maximum(math.log2(len(counts.classes)) - bits, 0.0)
        self.pairs = ClassPairs.of(counts)
        self.target = None if target is None else TargetCoverage(counts, target)
        histogram, holders = self.label_distribution.histogram, self.inter_client.holders
        self.rare = np.flatnonzero((histogram > 0) & (histogram < RARE / len(histogram)))
        self.single_holder = np.flatnonzero((holders == 1) & (len(counts) > 1))
        self.absent = np.flatnonzero(holders == 0)

    def group_sizes(self) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of vacant, minority and majority classes of each client, shape `(clients,)` each."""
        return {name: np.count_nonzero(self.groups == group, axis=1) for group, name in enumerate(GROUPS)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`, clients and classes by name; an undefined number is None."""
        classes, labels = self.counts.classes, self.label_distribution
        few = self.pairs.under(ClassPairs.few)

        def names(ids: NDArray[Any]) -> list[str]:
            return [classes[label] for label in ids]

        def plain(part: Any, *by_class: str) -> dict[str, Any]:
            """Return the numbers of a part, NaN as None, and of its arrays those that have a value for each class."""
            numbers = {name: value for name, value in vars(part).items() if not isinstance(value, np.ndarray)}
            arrays = {name: dict(zip(classes, getattr(part, name).tolist(), strict=True)) for name in by_class}
            return {name: None if value != value else value for name, value in numbers.items()} | arrays

        per_client = zip(
            self.counts.clients,
            self.counts.sizes.tolist(),
            labels.client_richness.tolist(),
            labels.client_evenness.tolist(),
            self.kl_to_uniform.tolist(),
            self.groups,
            strict=True,
        )
        target = self.target
        return {
            "clients": len(self.counts),
            "classes": list(classes),
            "samples": float(self.counts.counts.sum()),
            "label_distribution": plain(labels, "histogram"),
            "client_consistency": plain(self.client_consistency),
            "inter_client": plain(self.inter_client, "holders", "largest_holding"),
            "quantity": plain(self.quantity),
            "rare": names(self.rare),
            "single_holder": names(self.single_holder),
            "absent": names(self.absent),
            "class_pairs": {
                "pairs": self.pairs.number,
                f"under_{ClassPairs.hardly}": len(self.pairs.under(ClassPairs.hardly)),
                f"under_{ClassPairs.few}": len(few),
                "fewest": [
                    {"classes": names(pair), "together": together}
                    for pair, together in zip(few, self.pairs.together[tuple(few.T)].tolist(), strict=True)
                ],
            },
            "by_client": {
                client: {"samples": samples, "richness": richness, "evenness": even, "kl_to_uniform": divergence}
                | {name: names(np.flatnonzero(own == group)) for group, name in enumerate(GROUPS)}
                for client, samples, richness, even, divergence, own in per_client
            },
            "target": target
            and {
                **plain(target, "mix", "nearest"),
                "short": {classes[label]: float(target.short[label]) for label in np.flatnonzero(target.short)},
                "unheld": names(target.unheld),
            },
        }

    def sentences(self) -> list[str]:
        """Return the report in sentences: in each a finding and its consequence."""
        parts = (_overview, _skew, _vacant, _few_holders, _pairs, _cohorts, _sizes, _target)
        return [sentence for part in parts for sentence in part(self)]

    def statistics(self) -> list[tuple[str, str]]:
        """Return the report's numbers as rows of name and value; a heading has an empty value."""
        labels, alike = self.label_distribution, self.client_consistency
        inter, sizes, target, pairs = self.inter_client, self.quantity, self.target, self.pairs
        held = self.counts.sizes > 0
        richness, even = labels.client_richness[held], labels.client_evenness[held]
        groups = ", ".join(f"{numbers[held].mean():.1f} {name}" for name, numbers in self.group_sizes().items())
        note = f" (over {alike.pairs:,} sampled pairs)" if alike.sampled else ""
        by_chance = f"by chance {labels.skew_by_chance:.1%}"
        parts = {
            "label distribution": {
                "labels that occur": f"{labels.richness} of {len(labels.histogram)}",
                "entropy of all samples": f"{labels.entropy:.3f} bits, {labels.evenness:.1%} of even",
                "labels of a client": f"{richness.mean():.1f} on average, {richness.min()} to {richness.max()}",
                "evenness of a client": f"{even.mean():.1%} on average, {even.min():.1%} to {even.max():.1%}",
                "skew": f"the client explains {labels.skew:.1%} of the label's entropy, {by_chance}",
                "classes of a client": f"{groups} on average",
            },
            "client consistency (mixes sorted)": {
                "Hellinger distance": _decimal(alike.hellinger) + note,
                "earth mover's distance": f"{_decimal(alike.emd)} ranks",
            },
            "between clients": {
                "samples whose label others hold": f"{inter.shared:.1%}",
                "Jaccard similarity of label sets": _decimal(inter.jaccard) + note,
                "pairs of classes held together": f"{len(pairs.under(pairs.hardly)):,} of {pairs.number:,} by under "
                f"{pairs.hardly} samples, {len(pairs.under(pairs.few)):,} by under {pairs.few}",
            },
            "samples of a client": {
                "smallest, median, largest": " / ".join(map(amount, (sizes.smallest, sizes.median, sizes.largest))),
                "inequality": f"Gini {sizes.gini:.3f}, standard deviation / mean {sizes.variation:.2f}",
            },
        }
        if target is not None:
            parts["target"] = {
                "nearest mix by weights": f"squared distance {target.distance:.3g}, {target.covered:.1%} in common",
                "FedAvg's mix": f"squared distance {target.fedavg_distance:.3g}",
                "held by some client": f"{target.ceiling:.1%} of the target",
            }
        return [
            row
            for heading, values in parts.items()
            for row in [(heading, ""), *((f"  {name}", value) for name, value in values.items())]
        ]

    def __str__(self) -> str:
        rows = self.statistics()
        width = max(len(name) for name, _ in rows)
        lines = [f"- {sentence}" for sentence in self.sentences()]
        return "\n".join([*lines, "", *(f"{name:<{width}}  {value}".rstrip() for name, value in rows)])

    @staticmethod
    def unheld_in_words(
        counts: CountsLike, target: ArrayLike, class_names: tuple[str, ...], where: str = "target"
    ) -> str:
        """Say what it means that no client holds some of a target's classes; empty where there are none."""
        mix = as_target(target, len(class_names))
        missing = np.flatnonzero((mix > 0) & ~as_counts(counts).any(axis=0))
        if not len(missing):
            return ""
        share = float(mix[missing].sum())
        return (
            f"No client holds {_listed(class_names, missing)}, {_percent(share)} of the {where}: no method learns what "
            f"nobody has, so expect at most {1 - share:.1%} accuracy on the {where}'s mix."
        )


def describe(counts: CountsLike, target: ArrayLike | None = None) -> SkewReport:
    """Describe a federation's labels: FedLA's three properties, quantity skew, class groups, coverage of a target.

    Memory does not grow with the square of the clients: means over pairs of clients are exact by algebra or up to
    500,000 pairs, else over 200,000 pairs drawn with a fixed generator, and the report says so.

    Args:
        counts: Label counts, shape `(clients, classes)`.
        target: Label mix that the model will serve, shape `(classes,)`; normalised here.
    """
    record = counts if isinstance(counts, LabelCounts) else LabelCounts(counts)
    if not record.counts.max() > 0:
        raise ArgumentError("counts: no client holds a sample")
    return SkewReport(record, target)


def _overview(report: SkewReport) -> Iterator[str]:
    clients, classes, samples = len(report.counts), len(report.counts.classes), float(report.counts.sizes.sum())
    empty = f" ({report.quantity.empty} empty)" if report.quantity.empty else ""
    held = f"{amount(samples)} {'sample' if samples == 1 else 'samples'} of {counted(classes, 'class', 'classes')}"
    yield f"{counted(clients, 'client holds', f'clients{empty} hold')} {held}."


def _skew(report: SkewReport) -> Iterator[str]:
    labels = report.label_distribution
    if len(report.counts) == 1:
        yield "One client alone has no skew between clients."
        return
    hardly = labels.skew <= 2 * labels.skew_by_chance
    degree = "strongly" if labels.skew >= STRONG else "clearly" if labels.skew >= CLEAR else "mildly"
    consequence = (
        "Methods for label skew have little to gain here."
        if hardly
        else "The more skewed, the further local training pulls the clients' models apart, and the more accuracy plain "
        "averaging (FedAvg) loses."
    )
    yield (
        f"The labels are {'hardly' if hardly else degree} skewed: the client explains {_percent(labels.skew)} of the "
        "entropy of a sample's label; in a random division of as many samples it would explain "
        f"{_percent(labels.skew_by_chance)}. {consequence}"
    )


def _vacant(report: SkewReport) -> Iterator[str]:
    vacant = report.group_sizes()["vacant"][report.counts.sizes > 0]
    lacking = vacant[vacant > 0]
    if not len(lacking) or len(report.counts) == 1:
        return
    yield (
        f"{len(lacking):,} of {counted(len(vacant), 'client')} with samples {_one(len(lacking), 'lacks', 'lack')} "
        f"classes ({lacking.mean():.1f} on average). "
        "While such a client trains, it forgets the classes that it lacks. FedVLS distils these classes from the "
        "server's model."
    )
    one = int(np.count_nonzero(vacant == 1))
    if one:
        yield (
            f"{one:,} of them {_one(one, 'lacks', 'lack')} exactly one class: there FedVLS's distillation is zero by "
            "its formula, and its calibration works alone."
        )


def _few_holders(report: SkewReport) -> Iterator[str]:
    if len(report.absent):
        yield (
            f"No client holds {_names(report, report.absent)}: neither selecting nor weighing clients can make up for "
            "that."
        )
    if len(report.single_holder):
        yield (
            f"Held by one client alone: {_names(report, report.single_holder)}. A round without that client trains "
            "nothing on it, and FedAvg weighs the client by its size. FedLA weighs by shares of each label: it raises "
            "such a client, even one with a single sample of the label; with one participant a round it is FedAvg."
        )
    if len(report.rare):
        yield (
            f"Rare, below a fifth of an even share: {_names(report, report.rare)}. Look at accuracy per class, not "
            "only at the mean."
        )


def _pairs(report: SkewReport) -> Iterator[str]:
    found = report.pairs.in_words(report.counts.classes)
    if found and len(report.counts) > 1:
        yield (
            f"Some classes are told apart by hardly any client: {found}. FedVLS's calibrated loss and FedLC compare "
            "the classes of one client only, so they hardly learn these pairs; cross-entropy and FedRS compare every "
            "class with all others."
        )


def _cohorts(report: SkewReport) -> Iterator[str]:
    labels, clients = report.label_distribution, len(report.counts)
    if math.isnan(labels.cohort_entropy) or labels.cohort_entropy >= EVEN_ENOUGH * labels.entropy:
        return
    yield (
        f"The labels of a random tenth of the clients ({clients // 10:,}) have {labels.cohort_entropy:.2f} bits of "
        f"entropy on average, those of all {labels.entropy:.2f}: with few participants every round sees different "
        "labels. FedEntOpt selects participants whose labels together are most even; it needs the label counts once, "
        "and helps only where some of the clients take part in a round."
    )


def _sizes(report: SkewReport) -> Iterator[str]:
    clients, share = len(report.counts), report.quantity.largest_tenth
    if clients >= 10 and share >= 0.3:
        yield (
            f"The largest tenth of the clients ({clients // 10:,}) holds {_percent(share)} of all samples, and FedAvg "
            "gives it as much of the weight."
        )


def _target(report: SkewReport) -> Iterator[str]:
    target = report.target
    if target is None:
        yield "If the model will serve another label mix than all clients' together, give that mix as the target."
        return
    if lacking := SkewReport.unheld_in_words(report.counts, target.mix, report.counts.classes):
        yield lacking
    if not target.short.any():
        reach = "Weighing clients can match the target exactly"
    else:
        order = np.argsort(-target.short, kind="stable")[: np.count_nonzero(target.short)]
        worst = int(order[0])
        reach = (
            f"No weighing of clients matches the target. The nearest mix lies at a squared distance of "
            f"{target.distance:.3g} and has {_percent(target.covered)} in common with it. It falls short of "
            f"{_names(report, order)} (most of {report.counts.classes[worst]}: {target.nearest[worst]:.1%} instead of "
            f"{target.mix[worst]:.1%})"
        )
    if target.fedavg_distance - target.distance <= 1e-6:
        yield f"{reach}. FedAvg's mix is as near to it already, so FedPALS has nothing to gain."
        return
    yield (
        f"{reach}. FedAvg's mix lies at a squared distance of {target.fedavg_distance:.3g}. FedPALS weighs clients "
        "towards the target, which costs effective samples; `fedskew weights --method fedpals` says how many."
    )


def _names(report: SkewReport, classes: NDArray[Any]) -> str:
    return _listed(report.counts.classes, classes)


def _listed(class_names: tuple[str, ...], classes: NDArray[Any]) -> str:
    names = [class_names[label] for label in classes[:NAMED_AT_MOST]]
    if len(classes) > len(names):
        return f"classes {', '.join(names)} and {len(classes) - len(names)} more"
    return f"class {names[0]}" if len(names) == 1 else f"classes {', '.join(names[:-1])} and {names[-1]}"


def _one(number: int, one: str, several: str) -> str:
    return one if number == 1 else several


def _percent(share: float) -> str:
    return "under 1%" if share < 0.01 else f"{share:.0%}"


def _decimal(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
