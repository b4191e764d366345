"""A skew report in plain words: what the labels look like, what it means for training, and which method addresses it.

Only what the methods' papers support is said of a method; where their own figures limit a claim, the limit is said too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedskew.labels._skew import SkewReport

NAMED_AT_MOST = 6
STRONG, CLEAR = 0.4, 0.1
"""From which skew on it is called strong, or clear."""

EVEN_ENOUGH = 0.95
"""Below this part of all clients' entropy, a random cohort's is worth a word."""


def page(report: SkewReport) -> str:
    """The report as text: sentences, then figures."""
    rows = figures(report)
    width = max(len(name) for name, _ in rows)
    lines = [f"- {sentence}" for sentence in sentences(report)]
    return "\n".join([*lines, "", *(f"{name:<{width}}  {value}".rstrip() for name, value in rows)])


def sentences(report: SkewReport) -> list[str]:
    """What a person should know, a finding and what follows from it in each."""
    found = [_overview(report), _skew(report), *_vacant(report), *_few_holders(report), *_cohorts(report)]
    return [*found, *_sizes(report), *_target(report)]


def figures(report: SkewReport) -> list[tuple[str, str]]:
    """The figures of the page: name and value; a heading has no value."""
    labels, alike = report.label_distribution, report.client_consistency
    inter, sizes = report.inter_client, report.quantity
    held = report.counts.sizes > 0
    richness, evenness = labels.client_richness[held], labels.client_evenness[held]
    groups = ", ".join(f"{numbers[held].mean():.1f} {name}" for name, numbers in report.group_sizes().items())
    note = f" (over {alike.pairs:,} sampled pairs)" if alike.sampled else ""
    rows = [
        ("label distribution", ""),
        ("  labels held by anybody", f"{labels.richness} of {len(labels.histogram)}"),
        ("  entropy of all samples", f"{labels.entropy:.3f} bits, {labels.evenness:.1%} of even"),
        ("  labels of a client", f"{richness.mean():.1f} on average, {richness.min()} to {richness.max()}"),
        ("  evenness of a client", f"{evenness.mean():.1%} on average, {evenness.min():.1%} to {evenness.max():.1%}"),
        ("  skew", f"{labels.skew:.1%} of the label is told by the client, {labels.skew_by_chance:.1%} by chance"),
        ("  classes of a client", f"{groups} on average"),
        ("client consistency (mixes sorted)", ""),
        ("  Hellinger distance", _figure(alike.hellinger) + note),
        ("  earth mover's distance", f"{_figure(alike.emd)} ranks"),
        ("between clients", ""),
        ("  samples whose label others hold", f"{inter.shared:.1%}"),
        ("  Jaccard similarity of label sets", _figure(inter.jaccard) + note),
        ("samples of a client", ""),
        ("  smallest, median, largest", " / ".join(map(_count, (sizes.smallest, sizes.median, sizes.largest)))),
        ("  inequality", f"Gini {sizes.gini:.3f}, standard deviation / mean {sizes.variation:.2f}"),
    ]
    if report.target is not None:
        target = report.target
        rows += [
            ("target", ""),
            ("  reached by weighing clients", f"{target.covered:.1%}, squared distance {target.distance:.3g}"),
            ("  FedAvg's mix", f"squared distance {target.fedavg_distance:.3g}"),
        ]
    return rows


def _overview(report: SkewReport) -> str:
    clients, classes = len(report.counts), len(report.counts.classes)
    empty = f" ({report.quantity.empty} empty)" if report.quantity.empty else ""
    samples = _count(report.counts.sizes.sum())
    return (
        f"{clients:,} {_one(clients, 'client holds', f'clients{empty} hold')} {samples} samples of "
        f"{classes} {_one(classes, 'class', 'classes')}."
    )


def _skew(report: SkewReport) -> str:
    labels = report.label_distribution
    if len(report.counts) == 1:
        return "One client alone has no skew between clients."
    told = f"knowing the client tells {_percent(labels.skew)} of what there is to know about a sample's label"
    chance = f"a random division of as many samples would tell {_percent(labels.skew_by_chance)}"
    if labels.skew <= 2 * labels.skew_by_chance:
        return f"The labels are hardly skewed: {told}; {chance}. Methods for label skew have little to win here."
    degree = "strongly" if labels.skew >= STRONG else "clearly" if labels.skew >= CLEAR else "mildly"
    return (
        f"The labels are {degree} skewed: {told}; {chance}. The more skewed, the further local training pulls the "
        "clients' models apart, and the more accuracy plain averaging (FedAvg) loses."
    )


def _vacant(report: SkewReport) -> Iterator[str]:
    vacant = report.group_sizes()["vacant"][report.counts.sizes > 0]
    lacking = vacant[vacant > 0]
    if not len(lacking) or len(report.counts) == 1:
        return
    yield (
        f"{len(lacking):,} of {len(vacant):,} clients with samples lack classes ({lacking.mean():.1f} on average). "
        "While such a client trains, it forgets the classes that it lacks. FedVLS addresses this: it calibrates by the "
        "client's counts and distils the missing classes from the server's model."
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
            f"Nobody holds {_names(report, report.absent)}: neither choosing nor weighing clients can teach the model "
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


def _cohorts(report: SkewReport) -> Iterator[str]:
    labels, clients = report.label_distribution, len(report.counts)
    if math.isnan(labels.cohort_entropy) or labels.cohort_entropy >= EVEN_ENOUGH * labels.entropy:
        return
    yield (
        f"The labels of a random tenth of the clients ({clients // 10:,}) have {labels.cohort_entropy:.2f} bits of "
        f"entropy on average, those of all {labels.entropy:.2f}: with few participants every round sees other labels. "
        "FedEntOpt chooses participants whose labels together are most even; it asks for label counts once, and helps "
        "only where a part of the clients takes part."
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
    if not target.short.any():
        reach = "Weighing clients can match the target exactly"
    else:
        order = np.argsort(-target.short, kind="stable")[: np.count_nonzero(target.short)]
        worst = int(order[0])
        reach = (
            f"No weighing of clients matches the target: {_percent(target.covered)} of it at most, at a squared "
            f"distance of {target.distance:.3g}. It falls short of {_names(report, order)} (most of "
            f"{report.counts.classes[worst]}: {target.nearest[worst]:.1%} instead of {target.mix[worst]:.1%})"
        )
    if target.fedavg_distance - target.distance <= 1e-6:
        yield f"{reach}. FedAvg's mix is as near to it already, so FedPALS has nothing to win."
        return
    yield (
        f"{reach}. FedAvg's mix lies at a squared distance of {target.fedavg_distance:.3g}. FedPALS weighs clients "
        "towards the target, which costs effective samples; `fedskew weights --method fedpals` tells how many."
    )


def _names(report: SkewReport, classes: NDArray[Any]) -> str:
    names = [report.counts.classes[label] for label in classes[:NAMED_AT_MOST]]
    if len(classes) > len(names):
        return f"classes {', '.join(names)} and {len(classes) - len(names)} more"
    return f"class {names[0]}" if len(names) == 1 else f"classes {', '.join(names[:-1])} and {names[-1]}"


def _one(number: int, one: str, several: str) -> str:
    return one if number == 1 else several


def _percent(share: float) -> str:
    return "under 1%" if share < 0.01 else f"{share:.0%}"


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
