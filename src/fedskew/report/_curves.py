"""Values over rounds: every entry of `curves.toml` is a figure of the page."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources

import numpy as np

from fedskew.report import _charts as charts
from fedskew.report._figure import GOOD, Figure, figure
from fedskew.report._groups import Group, listed, together
from fedskew.report._runs import SeedRun, most_frequent
from fedskew.report.drawing import Curve, FloatArray


@dataclass(frozen=True)
class CurvePanel:
    """An entry of `curves.toml`, which says what its keys mean."""

    section: str
    title: str
    caption: str
    value: str
    unit: str = ""
    points: int = 200
    even: bool = False
    uneven: bool = False


def _draw(panel: CurvePanel, drawn: Figure) -> None:
    if panel.uneven and most_frequent(run for group in drawn.groups for run in group.seeds) is None:
        return
    unit = panel.unit
    lines: list[tuple[Curve, list[Group]]] = []  # groups that have the same line share it
    for group in drawn.groups:
        series = [found for run in group.seeds if (found := run.series(panel.value, 100 if unit == "%" else 1))]
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
    if panel.even and len(classes) == 1:
        levels = [math.log2(min(classes))]
        drawn.caption += " The dashed line is a perfectly even mix, the most there can be."
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


CURVES = [
    CurvePanel(**entry)
    for entry in tomllib.loads(resources.files("fedskew.report").joinpath("curves.toml").read_text("utf-8"))["curve"]
]
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
