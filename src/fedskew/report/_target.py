"""The target's label mix, as a run estimated it round by round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedskew.report import _charts as charts
from fedskew.report._figure import DATA, Figure, figure
from fedskew.report._groups import Group, listed
from fedskew.report._runs import SeedRun
from fedskew.report.drawing import Curve, FloatArray
from fedskew.tables import counted

_SHOWN = 30  # classes in the menu; those with the largest shares where there are more
_REACH = 1.959964
_ODD = 0.01

Estimates = list[tuple[int, dict[str, Any]]]


@figure(
    DATA,
    "The target's label mix, as estimated",
    "The share of one class, chosen above, as the model of each round estimated it from the target's unlabelled "
    "samples; band: 95 % interval.",
    alike=lambda group: (group.first.class_names, bool(_estimates(group.first))),
    one_seed=True,
)
def _target_mix(drawn: Figure) -> None:
    names = drawn.members[0].first.class_names
    estimated: list[tuple[Group, Estimates]] = []
    for group in drawn.members:
        if estimates := _estimates(group.first):
            estimated.append((group, estimates))
            drawn.add(group)
    if not estimated:
        return
    truths = [group.first.target for group, _ in estimated]
    last = [np.array(estimates[-1][1]["mix"]) for _, estimates in estimated]
    shares = np.max([mix if truth is None else truth for truth, mix in zip(truths, last, strict=True)], axis=0)
    order = np.argsort(-shares, kind="stable")[:_SHOWN].tolist()
    for place, label in enumerate(order):
        for (group, estimates), truth in zip(estimated, truths, strict=True):
            rounds = np.array([round for round, _ in estimates], dtype=np.float64)
            mix, error = _shares(estimates, "mix")[:, label], _shares(estimates, "se")[:, label]
            line = Curve(group.style, rounds, 100 * mix, 100 * _REACH * error, np.ones(len(mix), dtype=np.bool_))
            trace = charts.curve(group.label, line, [group.style], "%")
            trace["meta"]["pick"] = place
            if truth is not None:
                trace["meta"]["level"] = round(100 * float(truth[label]), 3)
            drawn.traces.append(trace)
    drawn.layout = charts.rounds_axes(drawn.traces, "%")
    drawn.layout["yaxis"] = charts.span(0.0, max(max(trace["y"]) for trace in drawn.traces), "%")
    drawn.menu, drawn.picks = "Class", [f"class {names[at]}" if names[at].isdecimal() else names[at] for at in order]
    if any(truth is not None for truth in truths):
        drawn.caption += " Dashed: the truth, which the server does not know."
    for group, estimates in estimated:
        for sentence in _findings(group.first, estimates):
            drawn.findings.append(f"{group.label}: {sentence}" if len(estimated) > 1 else sentence)


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
