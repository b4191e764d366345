"""The target's label mix, as a run estimated it round by round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedskew.report import _charts
from fedskew.report._charts import Chart, Trace
from fedskew.report._groups import Group, alike, listed, one_seed, titled
from fedskew.report._panel import Panel
from fedskew.report._runs import SeedRun
from fedskew.report.drawing import FloatArray
from fedskew.tables import counted

_SHOWN = 30  # classes in the menu; those with the largest shares where there are more
_REACH = 1.959964
_ODD = 0.01


@dataclass(frozen=True)
class _Estimates:
    """The estimates of a run: rounds `(estimates,)`, mixes and standard errors `(estimates, classes)`, all records."""

    rounds: FloatArray
    mixes: FloatArray
    errors: FloatArray
    records: list[dict[str, Any]]

    @classmethod
    def of(cls, run: SeedRun) -> _Estimates | None:
        """Return the estimates of a run; None where it made none."""
        said = [(record.round, record.target) for record in run.rounds if record.target is not None]
        found = [(round, target) for round, target in said if target["mix"] is not None]
        if not found:
            return None
        rounds, records = zip(*found, strict=True)
        mixes, errors = (np.array([record[key] for record in records], dtype=np.float64) for key in ("mix", "se"))
        return cls(np.array(rounds, dtype=np.float64), mixes, errors, list(records))


def target_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return how the estimates of the target's label mix went, for the runs that made some."""
    estimated = [group for group in groups if _Estimates.of(group.first) is not None]
    for members in alike(estimated, lambda group: group.first.class_names):
        yield _by_class(members, groups)


def _by_class(members: list[Group], groups: list[Group]) -> Panel:
    names = members[0].first.class_names
    found = [(group, estimates) for group in members if (estimates := _Estimates.of(group.first)) is not None]
    shares = np.max([_reference(group.first, estimates) for group, estimates in found], axis=0)
    order = np.argsort(-shares, kind="stable")[:_SHOWN].tolist()
    traces: list[Trace] = []
    for place, label in enumerate(order):
        for group, estimates in found:
            shown = 100 * estimates.mixes[:, label], 100 * _REACH * estimates.errors[:, label]
            trace = _charts.curve(group.label, group.style, [group.style], estimates.rounds, *shown, unit="%")
            trace["meta"]["pick"] = place
            if group.first.target is not None:
                trace["meta"]["level"] = round(100 * float(group.first.target[label]), 3)
            traces.append(trace)
    most = max(float(estimates.mixes.max()) for _, estimates in found)
    layout = {
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "round"}},
        "yaxis": _charts.span(0.0, 100 * most, "%"),
    }
    title = titled("The target's label mix, as estimated", members, groups)
    caption = (
        "The share of one class, chosen above, as the model of each round estimated it from the target's unlabelled "
        "samples; band: 95 % interval."
    )
    if any(group.first.target is not None for group in members):
        caption += " Dashed: the truth, which the server does not know."
    findings = [
        f"{group.label}: {sentence}" if len(found) > 1 else sentence
        for group, estimates in found
        for sentence in _findings(group.first, estimates)
    ]
    picks = [f"class {names[label]}" if names[label].isdecimal() else names[label] for label in order]
    chart = Chart(traces, layout, picks=picks, menu="Class")
    return Panel(title, chart, f"{title}, by class and round.", caption, one_seed(members), findings)


def _reference(run: SeedRun, estimates: _Estimates) -> FloatArray:
    return estimates.mixes[-1] if run.target is None else run.target


def _findings(run: SeedRun, estimates: _Estimates) -> Iterator[str]:
    last = estimates.records[-1]
    said = f"Estimated {counted(len(estimates.rounds), 'time')}, last after round {estimates.rounds[-1]:.0f}"
    if run.target is not None:
        away = 50 * np.abs(estimates.mixes - run.target).sum(axis=1)
        said += f", then with {away[-1]:.1f} % of the samples in wrong classes"
        if len(away) > 1:
            said += f" (at first {away[0]:.1f} %)"
    yield f"{said}."
    if waited := [record for record in run.rounds if record.fallback is not None]:
        yield (
            f"Clients were weighed as FedAvg does in {len(waited):,} of {counted(run.rounds[-1].round, 'round')}; the "
            f"last time as {waited[-1].fallback}."
        )
    misfits = [round for round, record in zip(estimates.rounds, estimates.records, strict=True) if record["misfit"]]
    if misfits:
        yield (
            f"After {counted(len(misfits), 'round')}, such as {misfits[-1]:.0f}, the target's samples looked like no "
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
