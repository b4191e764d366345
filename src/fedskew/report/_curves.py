"""Values over rounds: each entry of `curves.toml` is a figure of the page; the target's mix as it was estimated."""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

import numpy as np

from fedskew.report import _charts as charts
from fedskew.report._runs import Group, SeedRun, listed, together
from fedskew.report.drawing import Curve, FloatArray
from fedskew.tables import counted

_SHOWN = 30  # classes of a target's mix in the menu; those with the largest shares where there are more
_REACH = 1.959964
_ODD = 0.01

Estimates = list[tuple[int, dict[str, Any]]]


_words = resources.files("fedskew.report").joinpath("curves.toml").read_text("utf-8")
_LEVELS = {
    "even": " The dashed line is a perfectly even mix, the most there can be.",
    "majority": " The dashed line is the share of the most frequent class: what always naming it gets.",
}


def _draw(
    drawn: charts.Figure, value: str, unit: str = "", points: int = 200, level: str = "", uneven: bool = False
) -> None:
    """Draw an entry of `curves.toml`, which says what its keys mean."""
    if uneven and SeedRun.most_frequent(run for group in drawn.groups for run in group.seeds) is None:
        return
    by_points: dict[str, tuple[Curve, list[Group]]] = {}  # groups that have the same line share it
    for group in drawn.groups:
        series = [found for run in group.seeds if (found := run.series(value, 100 if unit == "%" else 1))]
        if not series:
            continue
        line = Curve.over_seeds(group.style, series, points)
        drawn.add(group, seeds=len(series))
        digits = -math.floor(math.log10(_noise(line.mean)))
        values = (None if of is None else np.round(of, digits).tolist() for of in (line.mean, line.std))
        by_points.setdefault(str([line.x.tolist(), *values]), (line, []))[1].append(group)
    if not by_points:
        return
    lines = list(by_points.values())
    levels: list[float] = []
    if level and len(heights := {_level(group.first, level) for group in drawn.groups}) == 1 and max(heights) > 0:
        levels = [*heights]
        drawn.caption += _LEVELS[level]
    if any(line.std is not None for line, _ in lines):
        drawn.caption += " Line: mean over seeds; band: one standard deviation to each side."
    if not all(line.complete.all() for line, _ in lines):
        drawn.caption += " Where a line is thin, some of its seeds had already stopped."
    if (longest := max(line.block for line, _ in lines)) > 1:
        drawn.caption += f" Each point is the mean of up to {longest} recorded rounds."
    drawn.traces = [trace for line, owners in lines for trace in _traces(line, owners, unit)]
    drawn.over_rounds(unit, levels)
    drawn.description = [f"{together(owners)} ends at {charts.number(line.mean[-1], unit)}" for line, owners in lines]
    for line, owners in lines:
        labels = listed(group.label for group in owners)
        if len(line.mean) > 1 and np.ptp(line.mean) <= _noise(line.mean):
            drawn.findings.append(f"{drawn.about(*owners)}{charts.number(line.mean[0], unit)} in every round.")
        elif len(owners) > 1:
            drawn.findings.append(f"The same line: {labels}.")


for _entry in tomllib.loads(_words)["curve"]:
    charts.figure(_entry.pop("section"), _entry.pop("title"), _entry.pop("caption"))(partial(_draw, **_entry))


@charts.figure(
    charts.GOOD,
    "Reliability",
    "The last evaluated model: test samples by the probability of the class that is named, in 15 bins, and how many of "
    "them are right. On the dashed diagonal a probability is what it says; below it, the model is too sure.",
)
def _reliability(drawn: charts.Figure) -> None:
    for group in drawn.groups:
        last = [found for run in group.seeds if (found := run.last_evaluation) is not None]
        bins = [np.array(one.reliability) for one in last if one.reliability is not None]
        if not bins:
            continue
        samples, right, confidence = np.sum(bins, axis=0).T
        some = samples > 0
        x, y = (100 * of[some] / samples[some] for of in (confidence, right))
        points = {"x": charts.numbers(x, 1), "y": charts.numbers(y, 1), "customdata": charts.numbers(samples[some], 0)}
        trace = charts.markers(group, points, "%{customdata} samples, %{x:.1f} % sure: %{y:.1f} % right")
        drawn.add(group, trace | {"mode": "lines+markers"}, seeds=len(bins))
        error = np.mean([one.ece for one in last if one.ece is not None])
        drawn.findings.append(f"Calibration error: {drawn.about(group)}{charts.number(100 * float(error))}.")
    if drawn.several:
        drawn.caption += " All seeds' samples together."
    drawn.square(100, "probability of the class that is named", "right", range=[-2, 102])


@charts.figure(
    charts.GOOD,
    "Classes that the round's clients hold, and those that they don't",
    "The model right after a round: mean accuracy on the classes that some client of the round trained on (solid), and "
    "on those that none of them holds (dotted). The gap is what a round costs the classes that it has no sample of. "
    "Rounds whose cohort held every class, or that were not evaluated, have no dotted point.",
)
def _held_and_vacant(drawn: charts.Figure) -> None:
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
        drawn.over_rounds("%")


@charts.figure(
    charts.ROUND,
    "Logged by the method",
    "What the method's components noted of each round, one figure at a time, chosen above. Line: mean over seeds.",
    alike=lambda group: tuple(_logged_names(group)),
)
def _logged(drawn: charts.Figure) -> None:
    names = _logged_names(drawn.members[0])
    for group in drawn.members if names else []:
        for place, name in enumerate(names):
            series = [found for run in group.seeds if (found := _figures(run, name))]
            if series:
                line = replace(Curve.over_seeds(group.style, series, 200), std=None)
                drawn.traces.append(charts.curve(group.label, line, [group.style], "", pick=place))
        drawn.add(group, seeds=len(group.seeds))
    if drawn.traces:
        drawn.over_rounds("")
        drawn.layout["yaxis"] = {"nticks": 6}  # each figure has its own scale
        drawn.menu, drawn.picks = "Figure", [charts.text(name) for name in names]
        if len(names) == 1:
            drawn.title += f": {names[0]}"


def _logged_names(group: Group) -> list[str]:
    records = (record for run in group.seeds for record in run.rounds)
    return sorted({name for record in records for name in record.logged or {}})


def _figures(run: SeedRun, name: str) -> dict[int, float]:
    found = ((record.round, (record.logged or {}).get(name)) for record in run.rounds)
    return {round: value for round, value in found if value is not None}


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


def _level(run: SeedRun, level: str) -> float:
    """Return where a dashed line stands for a run."""
    if level == "even":
        return math.log2(len(run.class_names))
    return 0.0 if (last := run.last_evaluation) is None else round(100 * last.majority, 6)


def _noise(values: FloatArray) -> float:
    """Return the difference up to which two values count as equal: rounding makes such."""
    return 1e-6 * max(float(np.abs(values).max()), 1e-12)


def _traces(line: Curve, owners: list[Group], unit: str) -> Iterator[charts.Trace]:
    name, runs = together(owners), [group.style for group in owners]
    whole = line.complete
    yield charts.curve(name, line.part(whole), runs, unit)
    if not whole.all():  # the thin part begins where the complete one ends
        end = max(int(np.flatnonzero(~whole)[0]) - 1, 0)
        yield charts.curve(name, line.part(slice(end, None)), runs, unit, thin=True)


@charts.figure(
    charts.DATA,
    "The target's label mix, as estimated",
    "The share of one class, chosen above, as the model of each round estimated it from the target's unlabelled "
    "samples; band: 95 % interval.",
    alike=lambda group: (group.first.class_names, bool(_estimates(group.first))),
    one_seed=True,
)
def _target_mix(drawn: charts.Figure) -> None:
    names = drawn.members[0].first.class_names
    estimated = [(group, estimates) for group in drawn.members if (estimates := _estimates(group.first))]
    if not estimated:
        return
    known = [
        np.array(estimates[-1][1]["mix"]) if (truth := group.first.target) is None else truth
        for group, estimates in estimated
    ]
    order = np.argsort(-np.max(known, axis=0), kind="stable")[:_SHOWN].tolist()
    for group, estimates in estimated:
        drawn.add(group)
        truth = group.first.target
        rounds = np.array([round for round, _ in estimates], dtype=np.float64)
        mix, error = 100 * _shares(estimates, "mix"), 100 * _REACH * _shares(estimates, "se")
        for place, label in enumerate(order):
            line = Curve(group.style, rounds, mix[:, label], error[:, label], np.ones(len(mix), dtype=np.bool_))
            level: dict[str, Any] = {} if truth is None else {"level": round(100 * float(truth[label]), 3)}
            drawn.traces.append(charts.curve(group.label, line, [group.style], "%", pick=place, **level))
        for sentence in _findings(group.first, estimates):
            drawn.findings.append(f"{group.label}: {sentence}" if len(estimated) > 1 else sentence)
    drawn.over_rounds("%")
    drawn.layout["yaxis"] = charts.span(0.0, max(max(trace["y"]) for trace in drawn.traces), "%")
    drawn.menu, drawn.picks = "Class", [f"class {names[at]}" if names[at].isdecimal() else names[at] for at in order]
    if any(group.first.target is not None for group, _ in estimated):
        drawn.caption += " Dashed: the truth, which the server does not know."


def _estimates(run: SeedRun) -> Estimates:
    records = [(record.round, record.target) for record in run.rounds if record.target is not None]
    return [(round, target) for round, target in records if target["mix"] is not None]


def _shares(estimates: Estimates, key: str) -> FloatArray:
    return np.array([record[key] for _, record in estimates], dtype=np.float64)


def _findings(run: SeedRun, estimates: Estimates) -> Iterator[str]:
    last_round, last = estimates[-1]
    said = f"Estimated {counted(len(estimates), 'time')}, last after round {last_round}"
    if run.target is not None:
        away = 50 * np.abs(_shares(estimates, "mix") - run.target).sum(axis=1)
        said += f", then with {away[-1]:.1f} % of the samples in wrong classes"
        if len(away) > 1:
            said += f" (at first {away[0]:.1f} %)"
    yield f"{said}."
    if waited := [record for record in run.rounds if record.fallback is not None]:
        yield (
            f"Clients were weighed as FedAvg does in {len(waited):,} of {counted(run.rounds[-1].round, 'round')}; the "
            f"last time as {waited[-1].fallback}."
        )
    misfits = [round for round, record in estimates if record["misfit"]]
    if misfits:
        yield (
            f"After {counted(len(misfits), 'round')}, such as {misfits[-1]}, the target's samples looked like no "
            "mix of the clients' classes."
        )
    elif last["p"] is not None:
        yield f"The target's samples look like a mix of the clients' classes (p = {last['p']:.2g} in the last test)."
    if last["unseen"]:
        names = listed(run.class_names[label] for label in last["unseen"])
        yield f"No held-out sample of {names}: whether the target has any is not known, and 0 is assumed."
    sites = last["sites"]
    if sites["odd"]:
        odd = listed(run.client_names[int(client)] for client in sites["odd"])
        yield (
            f"Of {sites['tested']:,} clients, {odd} hold samples that the model takes for something else than the same "
            f"classes of the others (p < {_ODD:g}, which chance alone gives to {_ODD * sites['tested']:.2g})."
        )
