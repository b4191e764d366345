"""What a report shows: from the records of runs to figures with their captions.

A value of the records becomes a curve of the report by one entry in `CURVES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from fedskew import drawing
from fedskew.drawing import Floats
from fedskew.engine import RoundRecord
from fedskew.report._runs import SeedRun, effective_mix, label_shares, mean_weights

Value = Callable[[RoundRecord], float | None]

GOOD, DATA, ROUND, LOCAL = (
    "How good the model is",
    "Who holds what, and who trains",
    "What happens in a round",
    "Clients after their local training",
)


@dataclass(frozen=True)
class Group:
    """The runs of one label, by seed, and the number of the label's colour and marker, the same on the whole page."""

    label: str
    style: int
    seeds: list[SeedRun]

    @property
    def first(self) -> SeedRun:
        """The lowest seed, which figures of single clients show: another seed may split the data otherwise."""
        return self.seeds[0]


@dataclass(frozen=True)
class Panel:
    """A figure and the words around it.

    Attributes:
        title: Heading of the figure.
        svg: The figure.
        caption: How to read it.
        basis: How many seeds it rests on.
        groups: The legend; empty where colours mean something else.
        findings: What it shows, in words.
    """

    title: str
    svg: Markup
    caption: str
    basis: str
    groups: list[Group]
    findings: list[str]


@dataclass(frozen=True)
class CurvePanel:
    """A value of the records that the report draws over rounds, for the runs that recorded it.

    Attributes:
        section: Heading under which it stands.
        title: Its own heading.
        value: The value of a record; None where the round has none.
        caption: How to read it.
        unit: "%" for a share, which is multiplied by 100; or the unit as it is printed.
        points: A longer curve is drawn as the means of at most so many blocks of rounds. A property of the cohort
            jumps from round to round, so that only its level can be read: fewer points show it better.
        most: The highest possible value for a number of classes, drawn as a dashed line.
        most_caption: What this line is.
    """

    section: str
    title: str
    value: Value
    caption: str
    unit: str = ""
    points: int = 200
    most: Callable[[int], float] | None = None
    most_caption: str = ""


def _of(name: Literal["accuracy", "target_accuracy", "worst_class"]) -> Value:
    return lambda record: None if record.evaluation is None else getattr(record.evaluation, name)


def _mean_over_clients(kind: Literal["majority", "minority", "vacant"]) -> Value:
    def value(record: RoundRecord) -> float | None:
        found = [getattr(client, kind) for client in record.clients or []]
        values = [number for number in found if number is not None and math.isfinite(number)]
        return float(np.mean(values)) if values else None

    return value


_LOCAL_MODEL = (
    "Each client's own model right after its local training, tested on the classes that this client {}. Mean over the "
    "clients of a round."
)

CURVES = (
    CurvePanel(
        GOOD,
        "Accuracy on the test set",
        _of("accuracy"),
        "Share of the test samples that the model gets right after each round; higher is better.",
        unit="%",
    ),
    CurvePanel(
        GOOD,
        "Accuracy on the target mix",
        _of("target_accuracy"),
        "The same test, its classes weighted by the target's label mix: what to expect where the model will be used.",
        unit="%",
    ),
    CurvePanel(
        GOOD,
        "Accuracy on the worst class",
        _of("worst_class"),
        "Share of the samples of one class that the model gets right, for the class where that share is lowest; it may "
        "be another class every round.",
        unit="%",
    ),
    CurvePanel(
        ROUND,
        "Label entropy of the cohort",
        lambda record: record.entropy,
        "How evenly the labels of the chosen clients, added up, cover the classes.",
        unit="bits",
        points=60,
        most=math.log2,
        most_caption="a perfectly even mix, the most there can be",
    ),
    CurvePanel(
        ROUND,
        "Distance from the target mix",
        lambda record: record.target_distance,
        "Squared distance between the label mix that the weights give a round and the target's; 0 is a perfect match.",
        points=60,
    ),
    CurvePanel(
        ROUND,
        "Effective sample size",
        lambda record: record.ess_share,
        "How many of the cohort's samples count after weighting: 100 % is FedAvg; the lower the line, the fewer "
        "samples decide and the noisier the round.",
        unit="%",
        points=60,
    ),
    CurvePanel(
        ROUND,
        "Drift diversity",
        lambda record: record.drift,
        "How much the clients' updates pull apart: their squared lengths, added up, over the squared length of their "
        "sum. The higher, the more they cancel each other.",
        points=60,
    ),
    CurvePanel(
        ROUND,
        "Training loss",
        lambda record: record.loss,
        "Mean loss that the clients minimise, weighted as their updates are. Runs with different objectives can't be "
        "compared by it.",
    ),
    CurvePanel(
        LOCAL,
        "Accuracy on majority classes",
        _mean_over_clients("majority"),
        _LOCAL_MODEL.format("holds many samples of"),
        unit="%",
    ),
    CurvePanel(
        LOCAL,
        "Accuracy on minority classes",
        _mean_over_clients("minority"),
        _LOCAL_MODEL.format("holds few samples of"),
        unit="%",
    ),
    CurvePanel(
        LOCAL,
        "Accuracy on vacant classes",
        _mean_over_clients("vacant"),
        _LOCAL_MODEL.format("holds no sample of: what the model still knows of them, it owes to the other clients"),
        unit="%",
    ),
)
"""Every value that the report draws over rounds, in the order of the page."""


def sections(groups: list[Group]) -> list[tuple[str, list[Panel]]]:
    """Return every panel that these runs have the records for, under its heading."""
    found: dict[str, list[Panel]] = {heading: [] for heading in (GOOD, DATA, ROUND, LOCAL)}
    for curve in CURVES:
        found[curve.section] += _curve(groups, curve)
    found[GOOD] += _per_class(groups)
    found[DATA] += [*_holdings(groups), *_label_mixes(groups), *_participation(groups), *_weights(groups)]
    return [(heading, panels) for heading, panels in found.items() if panels]


def _curve(groups: list[Group], panel: CurvePanel) -> Iterator[Panel]:
    unit = panel.unit
    lines, shown = [], []
    for group in groups:
        series = [found for run in group.seeds if (found := _series(run, panel))]
        if series:
            lines.append(drawing.Curve.over_seeds(group.style, series, panel.points))
            shown.append((group, len(series)))
    if not lines:
        return
    caption, reference = panel.caption, None
    classes = {len(group.first.class_names) for group in groups}
    if panel.most is not None and len(classes) == 1:
        reference = panel.most(min(classes))
        caption += f" The dashed line is {panel.most_caption}."
    if any(line.std is not None for line in lines):
        caption += " Line: mean over seeds; band: one standard deviation to each side."
    if not all(line.complete.all() for line in lines):
        caption += " Where a line is thin, some of its seeds had already stopped."
    if (longest := max(line.block for line in lines)) > 1:
        caption += f" Each point is the mean of up to {longest} recorded rounds."
    ends = [
        f"{group.label} ends at {_number(line.mean[-1], unit)}" for (group, _), line in zip(shown, lines, strict=True)
    ]
    figure, axes = drawing.panel(250, unit)
    drawing.curves(axes, lines, unit=unit, reference=reference)
    svg = _svg(figure, f"{panel.title} over rounds: {', '.join(ends)}.")
    yield Panel(panel.title, svg, caption, _basis(shown), [group for group, _ in shown], [])


def _series(run: SeedRun, panel: CurvePanel) -> dict[int, float]:
    """Return the value by round, where there is a finite one."""
    scale = 100.0 if panel.unit == "%" else 1.0
    found = ((record.round, panel.value(record)) for record in run.rounds)
    return {number: scale * x for number, x in found if x is not None and math.isfinite(x)}


def _per_class(groups: list[Group]) -> Iterator[Panel]:
    for members in _alike(groups, lambda group: group.first.class_names):
        names = members[0].first.class_names
        many = len(names) > drawing.MANY_CLASSES
        dots, shown, worst = [], [], []
        for group in members:
            finals = [final for run in group.seeds if (final := _final_per_class(run)) is not None]
            if finals:
                mean, std = _mean_and_std(100 * np.array(finals))
                dots.append(drawing.Values(group.style, mean, std))
                shown.append((group, len(finals)))
                if np.isfinite(mean).any():
                    lowest = np.flatnonzero(mean == np.nanmin(mean))
                    others = f" and {len(lowest) - 1} more" if len(lowest) > 1 else ""
                    named = f"{names[lowest[0]]}{others} ({_number(mean[lowest[0]], '%')})"
                    worst.append(f"{group.label}: {named}" if len(groups) > 1 else named)
        if not dots:
            continue
        finding = f"Worst class: {'; '.join(worst) or 'none was tested'}."
        title = _title("Accuracy by class", members, groups)
        caption = (
            "The last evaluated model on each class, every run in its own order from its worst class to its best. "
            if many
            else "The last evaluated model on each class, one row a class. "
        )
        caption += "A ring marks a run's worst class."
        if not many and any(one.std is not None for one in dots):
            caption += " Whiskers: one standard deviation over seeds to each side."
        figure, axes = drawing.panel(drawing.class_height(len(dots), len(names)), "accuracy, %")
        drawing.per_class(axes, dots, names)
        svg = _svg(figure, f"{title}. {finding}")
        yield Panel(title, svg, caption, _basis(shown), [group for group, _ in shown], [finding])


def _final_per_class(run: SeedRun) -> Floats | None:
    for record in reversed(run.rounds):
        if record.evaluation is not None:
            return np.array(record.evaluation.per_class, dtype=np.float64)  # None becomes NaN
    return None


def _holdings(groups: list[Group]) -> Iterator[Panel]:
    for members in _alike(groups, lambda group: (group.first.class_names, group.first.counts.tobytes())):
        counts, names = members[0].first.counts, members[0].first.class_names
        title = _title("Who holds what", members, groups)
        held = np.count_nonzero(counts, axis=1)
        finding = (
            f"{len(counts)} clients, {counts.sum():,} samples, {len(names)} classes; a client holds {held.min()} to "
            f"{held.max()} of the classes, {np.median(held):g} in the median."
        )
        caption = (
            "One column a client, one row a class: the stronger the colour, the more samples; blank is none. A column "
            "with few coloured cells is a client that knows few classes."
        )
        figure = drawing.holdings_panel(*counts.shape)
        drawing.who_holds_what(figure, counts, members[0].first.client_names, names)
        yield Panel(title, _svg(figure, f"{title}: {finding}"), caption, _one_seed(members), [], [finding])


def _label_mixes(groups: list[Group]) -> Iterator[Panel]:
    def kind(group: Group) -> Hashable:
        target = group.first.target
        return group.first.class_names, None if target is None else target.tobytes()

    for members in _alike(groups, kind):
        names = members[0].first.class_names
        dots, shown = [], []
        for group in members:
            mixes = [mix for run in group.seeds if (mix := effective_mix(run)) is not None]
            if mixes:
                dots.append(drawing.Values(group.style, 100 * np.mean(mixes, axis=0)))
                shown.append((group, len(mixes)))
        if not dots:
            continue
        pooled = np.mean([label_shares(run.counts.sum(axis=0)) for group in members for run in group.seeds], axis=0)
        targets = [run.target for group in members for run in group.seeds if run.target is not None]
        target = np.mean(targets, axis=0) if targets else None  # a target client's mix differs between seeds
        title = _title("The label mix that trained the model", members, groups)
        caption = (
            "Markers: the labels of the clients that trained, counted with the weight of their update; mean over "
            "rounds and seeds. Thin line: the labels of all clients together."
        )
        if target is not None:
            caption += " Grey: the target mix; where the markers lie at its edge, training saw the target's mix."
        figure, axes = drawing.panel(drawing.class_height(len(dots), len(names)), "share of the label mix, %")
        drawing.label_mix(axes, dots, pooled, target, names)
        svg = _svg(figure, f"{title}, by class.")
        yield Panel(title, svg, caption, _basis(shown), [group for group, _ in shown], [])


def _participation(groups: list[Group]) -> Iterator[Panel]:
    rows, shown, diverged = [], [], []
    for group in groups:
        trained = [record for record in group.first.rounds if record.round > 0]
        if trained:
            clients = len(group.first.counts)
            chosen = _times([record.cohort for record in trained], clients) / len(trained)
            failed = _times([record.diverged for record in trained], clients) / len(trained)
            rows.append(drawing.Participation(group.style, group.label, chosen, failed))
            shown.append(group)
            if failed.any():
                times = sum(len(record.diverged) for record in trained)
                who = np.count_nonzero(failed)
                diverged.append(f"{group.label}: {who} client{'s' if who > 1 else ''} diverged, {times} times in all.")
    if not rows:
        return
    title = "How often each client took part"
    caption = "One bar a client: the share of rounds in which it was chosen. Dashed: the mean."
    if diverged:
        caption += " In the colour of this text: the rounds in which it diverged and was left out."
    spans = [
        f"{row.label} {_number(100 * row.chosen.min(), '%')} to {_number(100 * row.chosen.max(), '%')}" for row in rows
    ]
    figure = Figure(figsize=(drawing.WIDTH / 72, (40 + 84 * len(rows)) / 72), layout="constrained")
    drawing.participation(figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows)
    svg = _svg(figure, f"{title}, share of rounds: {', '.join(spans)}.")
    yield Panel(title, svg, caption, _one_seed(shown), [], diverged)


def _times(lists: Sequence[Sequence[int]], clients: int) -> Floats:
    """Count how often each client is in these lists."""
    ids = np.array([client for clients_ in lists for client in clients_], dtype=np.int64)
    return np.bincount(ids, minlength=clients).astype(np.float64)


def _weights(groups: list[Group]) -> Iterator[Panel]:
    found = [(group, mean_weights(group.first)) for group in groups]
    shown = [group for group, weights in found if len(weights.clients)]
    if not shown:
        return
    title = "How much each client counts"
    caption = (
        "One marker a client, mean over the rounds that it took part in. On the dashed diagonal it counts as in "
        "FedAvg, by its number of samples; above it counts more, below less."
    )
    figure, axes = drawing.panel(300, "mean weight given, %")
    drawing.weights_against_fedavg(
        axes,
        [
            drawing.ClientWeights(group.style, weights.fedavg, weights.given)
            for group, weights in found
            if group in shown
        ],
    )
    svg = _svg(figure, f"{title}: mean weight against FedAvg's, {', '.join(group.label for group in shown)}.")
    yield Panel(title, svg, caption, _one_seed(shown), shown, [])


def _svg(figure: Figure, alt: str) -> Markup:
    return Markup(drawing.inline_svg(figure, alt))


def _mean_and_std(values: Floats) -> tuple[Floats, Floats | None]:
    """Over the first axis, seeds. A class without a sample has none in every seed, so NaN may spread."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else None


def _alike(groups: list[Group], kind: Callable[[Group], Hashable]) -> list[list[Group]]:
    """Return the groups that can share a figure."""
    alike: dict[Hashable, list[Group]] = {}
    for group in groups:
        alike.setdefault(kind(group), []).append(group)
    return list(alike.values())


def _title(title: str, members: list[Group], groups: list[Group]) -> str:
    return title if len(members) == len(groups) else f"{title}: {'; '.join(group.label for group in members)}"


def _basis(shown: list[tuple[Group, int]]) -> str:
    """Say how many seeds each label brings to a figure."""
    counts = {count for _, count in shown}
    if len(counts) == 1:
        count = counts.pop()
        each = " each" if len(shown) > 1 else ""
        return f"{count} seed{'s' if count > 1 else ''}{each}"
    return "Seeds: " + ", ".join(f"{group.label} {count}" for group, count in shown)


def _one_seed(members: list[Group]) -> str:
    seeds = {group.first.seed for group in members}
    most = max(len(group.seeds) for group in members)
    which = f"seed {seeds.pop()}" if len(seeds) == 1 else "the lowest of each run"
    return f"1 seed{f' of {most}' if most > 1 else ''} ({which})"


def _number(value: float, unit: str) -> str:
    return f"{value:.1f} %" if unit == "%" else f"{value:.3g} {unit}".rstrip()
