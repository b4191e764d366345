"""Values over rounds. A value of the records becomes a figure of the page by one entry in `CURVES`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fedskew.report import _charts as charts
from fedskew.report._figure import GOOD, LOCAL, ROUND, Figure, figure
from fedskew.report._groups import Group, listed, together
from fedskew.report._runs import SeedRun, most_frequent
from fedskew.report.drawing import Curve, FloatArray

if TYPE_CHECKING:
    from fedskew.engine import RoundRecord

Value: TypeAlias = "Callable[[RoundRecord], float | None]"


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
        uneven: Whether it is shown only where the test set's classes are uneven (see `most_frequent`).
    """

    section: str
    title: str
    value: Value
    caption: str
    unit: str = ""
    points: int = 200
    most: Callable[[int], float] | None = None
    most_caption: str = ""
    uneven: bool = False


def _of(name: str) -> Value:
    return lambda record: None if record.evaluation is None else getattr(record.evaluation, name)


def _mean_over_clients(kind: str) -> Value:
    def value(record: RoundRecord) -> float | None:
        found = [getattr(client, kind) for client in record.clients or []]
        values = [one for one in found if one is not None and math.isfinite(one)]
        return float(np.mean(values)) if values else None

    return value


_KINDS = {
    "majority": "holds many samples of",
    "minority": "holds few samples of",
    "vacant": "holds no sample of: what the model still knows of them, it owes to the other clients",
}
_LOCAL_MODEL = (
    "Each client's own model right after its local training, tested on the classes that this client {}. Mean over the "
    "clients of a round."
)

CURVES = (
    CurvePanel(
        GOOD,
        "Balanced accuracy on the test set",
        _of("balanced_accuracy"),
        "Share of the test samples of a class that the model gets right, mean over the classes: rare ones count as "
        "much as frequent ones.",
        unit="%",
        uneven=True,
    ),
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
        ROUND,
        "Differential privacy: epsilon spent",
        lambda record: None if record.privacy is None else record.privacy["epsilon"],
        "What the updates so far have told at most of any one client, the one that took part most often; no "
        "amplification by sampling is counted, and label counts are apart.",
    ),
    *(
        CurvePanel(LOCAL, f"Accuracy on {kind} classes", _mean_over_clients(kind), _LOCAL_MODEL.format(holds), "%")
        for kind, holds in _KINDS.items()
    ),
)
"""Every value that the report draws over rounds, in the order of the page."""


def _draw(panel: CurvePanel, drawn: Figure) -> None:
    if panel.uneven and most_frequent(run for group in drawn.groups for run in group.seeds) is None:
        return
    unit = panel.unit
    lines: list[tuple[Curve, list[Group]]] = []  # groups that have the same line share it
    for group in drawn.groups:
        series = [found for run in group.seeds if (found := _series(run, panel))]
        if not series:
            continue
        line = Curve.over_seeds(group.style, series, panel.points)
        drawn.add(group, seeds=len(series))
        same = next((owners for other, owners in lines if _equal(line, other)), None)
        if same is None:
            lines.append((line, [group]))
        else:
            same.append(group)
    if not lines:
        return
    levels = []
    classes = {len(group.first.class_names) for group in drawn.groups}
    if panel.most is not None and len(classes) == 1:
        levels = [panel.most(min(classes))]
        drawn.caption += f" The dashed line is {panel.most_caption}."
    if any(line.std is not None for line, _ in lines):
        drawn.caption += " Line: mean over seeds; band: one standard deviation to each side."
    if not all(line.complete.all() for line, _ in lines):
        drawn.caption += " Where a line is thin, some of its seeds had already stopped."
    if (longest := max(line.block for line, _ in lines)) > 1:
        drawn.caption += f" Each point is the mean of up to {longest} recorded rounds."
    drawn.traces = [trace for line, owners in lines for trace in _traces(line, owners, unit)]
    drawn.layout = charts.rounds_axes(drawn.traces, unit, levels)
    drawn.description = [f"{together(owners)} ends at {charts.number(line.mean[-1], unit)}" for line, owners in lines]
    for line, owners in lines:
        labels = listed(group.label for group in owners)
        if len(line.mean) > 1 and np.ptp(line.mean) <= _noise(line.mean):
            drawn.findings.append(f"{drawn.about(*owners)}{charts.number(line.mean[0], unit)} in every round.")
        elif len(owners) > 1:
            drawn.findings.append(f"The same line: {labels}.")


for _panel in CURVES:
    figure(_panel.section, _panel.title, _panel.caption)(partial(_draw, _panel))


@figure(
    GOOD,
    "Classes that the round's clients hold, and those that they don't",
    "The model right after a round: mean accuracy on the classes that some client of the round trained on (solid), and "
    "on those that none of them holds (dotted). The gap is what a round costs the classes that it has no sample of. "
    "Rounds whose cohort held every class, or that were not evaluated, have no dotted point.",
)
def _held_and_vacant(drawn: Figure) -> None:
    for group in drawn.groups:
        by_seed = [_by_cohort(run) for run in group.seeds]
        held, vacant = ([series[at] for series in by_seed if series[at]] for at in (0, 1))
        if not vacant:
            continue
        drawn.add(group, seeds=len(vacant))
        for kind, dash, series in (("held", "solid", held), ("vacant", "dot", vacant)):
            if not series:  # the test samples are all of classes that nobody holds
                continue
            line = Curve.over_seeds(group.style, series, 60)
            if kind == "held":
                line = replace(line, std=None)
            name = kind if len(drawn.groups) == 1 else f"{group.label}, {kind}"
            drawn.traces.append(charts.curve(name, line, [group.style], "%", dash))
            drawn.description.append(f"{name} {charts.number(line.mean[-1])} at the end")
    if drawn.traces:
        drawn.layout = charts.rounds_axes(drawn.traces, "%")


def _by_cohort(run: SeedRun) -> tuple[dict[int, float], dict[int, float]]:
    """Return by round the mean accuracy, %, on the classes that the clients who trained hold, and on the others."""
    held, vacant = {}, {}
    for record in run.rounds:
        if record.evaluation is None or not record.answered:
            continue
        accuracies = 100 * np.array(record.evaluation.per_class, dtype=np.float64)
        tested = np.isfinite(accuracies)
        there = run.counts[record.answered].sum(axis=0) > 0
        if (tested & there).any():
            held[record.round] = float(accuracies[tested & there].mean())
        if (tested & ~there).any():
            vacant[record.round] = float(accuracies[tested & ~there].mean())
    return held, vacant


def _noise(values: FloatArray) -> float:
    """Return the difference up to which two values count as equal: rounding makes such."""
    return 1e-6 * float(np.abs(values).max(initial=1e-12))


def _equal(one: Curve, other: Curve) -> bool:
    def close(first: FloatArray | None, second: FloatArray | None) -> bool:
        if first is None or second is None:
            return first is second
        return np.allclose(first, second, rtol=0, atol=_noise(one.mean), equal_nan=True)

    return np.array_equal(one.x, other.x) and close(one.mean, other.mean) and close(one.std, other.std)


def _traces(line: Curve, owners: list[Group], unit: str) -> Iterator[charts.Trace]:
    name, runs = together(owners), [group.style for group in owners]
    whole = line.complete
    yield charts.curve(name, line.part(whole), runs, unit)
    if not whole.all():  # the thin part begins where the complete one ends
        end = max(int(np.flatnonzero(~whole)[0]) - 1, 0)
        yield charts.curve(name, line.part(slice(end, None)), runs, unit, thin=True)


def _series(run: SeedRun, panel: CurvePanel) -> dict[int, float]:
    """Return the value by round, where there is a finite one."""
    scale = 100.0 if panel.unit == "%" else 1.0
    found = ((record.round, panel.value(record)) for record in run.rounds)
    return {round: scale * x for round, x in found if x is not None and math.isfinite(x)}
