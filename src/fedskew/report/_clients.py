"""Figures of the clients: what they hold, how often they are asked, how much they count; the target's mix."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.labels import ClassPairs
from fedskew.report import _charts as charts
from fedskew.report._figure import DATA, Figure, add_cloud, class_dots, figure
from fedskew.report._groups import Group, alike, listed, same_cohorts, same_data, together
from fedskew.report._runs import label_shares
from fedskew.report.drawing import FloatArray

_CELLS = 120_000
_MOST_BARS = 200
_BARS = 60  # height of the clients' sizes above the map, in pixels
_PAIRED = 60  # classes whose pairs are drawn


def _digits(counts: NDArray[Any]) -> int:
    """Return the decimals of label counts: noisy ones have some."""
    return 2 if np.any(counts % 1) else 0


@figure(
    DATA,
    "Who holds what",
    "One column a client, one row a class: the stronger the colour, the more samples; blank is none. A column with few "
    "coloured cells is a client that knows few classes. On top, all samples of a client.",
    alike=same_data,
    one_seed=True,
    wide=True,
)
def _holdings(drawn: Figure) -> None:
    run = drawn.members[0].first
    counts, names = run.counts, run.class_names
    held = np.count_nonzero(counts, axis=1)
    drawn.findings = [
        f"{len(counts):,} clients, {counts.sum():,.12g} samples, {len(names)} classes; a client holds {held.min()} to "
        f"{held.max()} of the classes, {np.median(held):g} in the median."
    ]
    columns, digits = charts.categories(run.client_names, "client"), _digits(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    by_class = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1), counts.sum(axis=1) == 0))
    each = -(-len(counts) // max(_CELLS // len(names), 100))
    if each > 1:
        starts = range(0, len(counts), each)
        columns = [f"clients {start + 1:,} to {min(start + each, len(counts)):,}" for start in starts]
        counts, digits = charts.mean_of_blocks(counts[by_class].astype(np.float64), each), 1
        drawn.caption += f" Clients stand by their largest class, {each} to a column, which shows their mean."
    else:
        ways = {
            "by largest class": np.argsort(by_class),
            "most samples first": -counts.sum(axis=1),
            "fewest classes first": held,
        }
        drawn.axis, drawn.orders = "x", charts.orders(columns, ways)
    cells = [[value or None for value in row] for row in charts.numbers(counts.T, digits)]
    sizes = charts.bars(columns, charts.numbers(counts.sum(axis=1), digits), "%{x}: %{y:,} samples", ink="area")
    hover = "%{x}, %{y}: %{customdata:,} samples"
    drawn.add(
        drawn.members[0],
        charts.heat_map(columns, charts.categories(names, "class"), cells, hover),
        sizes | {"yaxis": "y2"},
    )
    tall = 20 * len(names) if len(names) <= charts.MANY else 400
    top = tall / (tall + 12 + _BARS)
    drawn.height = tall + _BARS + 112
    drawn.layout = {
        "xaxis": charts.CATEGORY | {"anchor": "y"} | ({"nticks": 12} if each > 1 else {}),
        "yaxis": charts.DOWN | {"domain": [0, top]},
        "yaxis2": {"domain": [1 - top * _BARS / tall, 1], "nticks": 3, "anchor": "x"},
        "bargap": 0.1,
        "hovermode": "closest",
    }


@figure(
    DATA,
    "Classes that clients hold together",
    "One cell a pair of classes: the smaller of a client's two counts, summed over clients. Losses that compare the "
    "classes of one client tell two classes apart by these samples; blank, or pale, is hardly ever.",
    alike=same_data,
    one_seed=True,
)
def _pairs(drawn: Figure) -> None:
    run = drawn.members[0].first
    if len(run.counts) < 2 or len(run.class_names) > _PAIRED or not run.counts.any():
        return
    pairs = ClassPairs.of(run.counts)
    if not len(pairs.under(pairs.few)):
        return
    rows = charts.categories(run.class_names, "class")
    occurs = np.diagonal(pairs.together) > 0
    cells = np.where(np.tril(np.outer(occurs, occurs), -1), pairs.together, np.nan)
    hover = "%{y} and %{x}: %{customdata:,} samples"
    drawn.add(drawn.members[0], charts.heat_map(rows, rows, charts.numbers(cells, _digits(pairs.together)), hover))
    if words := pairs.in_words(run.class_names):
        drawn.findings = [f"{words[0].upper()}{words[1:]}."]
    drawn.layout, drawn.height = {"xaxis": charts.CATEGORY, "yaxis": charts.DOWN}, 420


@figure(DATA, "How often each client took part", "", one_seed=True, by_run=True)
def _participation(drawn: Figure) -> None:
    """Draw how often each client was chosen, once for groups that chose the same ones; name who never was."""
    rows: list[tuple[list[Group], FloatArray, FloatArray]] = []
    for members in alike(drawn.groups, lambda group: (same_data(group), same_cohorts(group))):
        run = members[0].first
        trained = [record for record in run.rounds if record.round > 0]
        if not trained:
            continue
        chosen = _times([record.cohort for record in trained], len(run.counts))
        diverged = _times([record.diverged for record in trained], len(run.counts))
        rows.append((members, chosen / len(trained), diverged / len(trained)))
        if len(members) > 1:
            same = listed((group.label for group in members), 36)
            drawn.findings.append(f"The same clients in every round: {same}.")
        label = drawn.about(*members)
        for found in _never(members[0], chosen, len(trained)):
            drawn.findings.append(label + found if label else found[0].upper() + found[1:])
        for group in members:
            lost = [client for record in group.first.rounds for client in record.diverged]
            if who := len(set(lost)):
                plural = "s" if who > 1 else ""
                drawn.findings.append(f"{group.label}: {who} client{plural} diverged, {len(lost)} times in all.")
    many = max((len(chosen) for _, chosen, _ in rows), default=0) > _MOST_BARS
    for members, chosen, diverged in rows:
        ends = (charts.number(100 * share) for share in (chosen.min(), chosen.max()))
        drawn.description.append(f"{together(members)} {' to '.join(ends)}")
        traces = _histogram(members[0], chosen) if many else _bars(members[0], chosen, diverged)
        drawn.add(members[0], *traces, name=together(members))
    drawn.height = 300
    if many:
        drawn.caption = "How many clients were chosen in which share of the rounds. The bar at 0 % was never asked."
        drawn.layout = {
            "xaxis": {"title": {"text": "share of the rounds"}, "ticksuffix": " %", "nticks": 6},
            "yaxis": {"title": {"text": "clients"}, "nticks": 5},
            "bargap": 0.05,
            "hovermode": "closest",
        }
        return
    drawn.caption = "One bar a client: the share of rounds in which it was chosen. Dashed: the mean."
    if any(diverged.any() for _, _, diverged in rows):
        drawn.caption += " Outlined: the rounds in which it diverged and was left out."
    if len(rows) == 1:
        drawn.axis, drawn.orders = "x", charts.orders(drawn.traces[0]["x"], {"least often first": rows[0][1]})
    drawn.layout = {
        "xaxis": charts.CATEGORY,
        "yaxis": {"ticksuffix": " %", "rangemode": "tozero", "nticks": 5},
        "barmode": "overlay",
        "bargap": 0.15,
        "hovermode": "closest",
    }


def _never(group: Group, chosen: FloatArray, rounds: int) -> Iterator[str]:
    run = group.first
    never = np.flatnonzero(chosen == 0)
    sizes = run.counts.sum(axis=1)
    if len(never):
        names = [f"client {name}" if name.isdecimal() else name for name in run.client_names]
        share = sizes[never].sum() / max(sizes.sum(), 1)
        others = np.delete(run.counts, never, axis=0).sum(axis=0)
        lost = np.flatnonzero((others == 0) & (run.counts.sum(axis=0) > 0))
        only = f"; nobody else holds {listed(run.class_names[at] for at in lost)}" if len(lost) else ""
        yield (
            f"never asked in {rounds} round{'s' if rounds > 1 else ''}: {listed(names[at] for at in never)} "
            f"({len(never):,} of {len(chosen):,} clients, {100 * share:.1f} % of the samples{only})."
        )
    answered = _times([record.answered for record in run.rounds], len(chosen))
    if len(silent := np.flatnonzero((chosen > 0) & (answered == 0))):
        named = listed(run.client_names[at] for at in silent)
        yield f"asked, but no update of theirs ever counted: {named}."


def _bars(group: Group, chosen: FloatArray, diverged: FloatArray) -> Iterator[charts.Trace]:
    names, level = charts.categories(group.first.client_names, "client"), float(100 * chosen.mean())
    looks: dict[str, dict[str, Any]] = {"chosen": {"look": group.style, "bar": True}, "diverged": {"ink": "line"}}
    for (kind, look), shares in zip(looks.items(), (chosen, diverged), strict=True):
        if kind == "chosen" or shares.any():
            hover = f"%{{x}}: {kind} in %{{y:.1f}} % of the rounds"
            yield charts.bars(names, charts.numbers(100 * shares, 2), hover, level=level, **look) | {"name": kind}


def _histogram(group: Group, chosen: FloatArray) -> Iterator[charts.Trace]:
    times, clients = np.unique(np.round(100 * chosen, 2), return_counts=True)
    hover = "%{y:,} clients in %{x:.1f} % of the rounds"
    yield charts.bars(charts.numbers(times, 2), clients.tolist(), hover, look=group.style, bar=True)


def _times(lists: Sequence[Sequence[int]], clients: int) -> FloatArray:
    """Count how often each client is in these lists."""
    ids = np.array([client for chosen in lists for client in chosen], dtype=np.int64)
    return np.bincount(ids, minlength=clients).astype(np.float64)


@figure(
    DATA,
    "How much each client counts",
    "One marker a client, mean over the rounds that it took part in. On the dashed diagonal it counts as in FedAvg, by "
    "its number of samples; above it counts more, below less.",
    one_seed=True,
)
def _weights(drawn: Figure) -> None:
    plain = []
    top = 1e-9
    for group in drawn.groups:
        weights = group.first.mean_weights()
        if not len(weights.clients):
            continue
        if np.allclose(weights.weights, weights.fedavg, rtol=1e-6, atol=1e-12):
            plain.append(group.label)
        top = max(top, 100 * float(weights.fedavg.max()))
        hover = "%{customdata}: %{y:.3g} %, FedAvg %{x:.3g} %"
        add_cloud(drawn, group, weights.clients, 100 * weights.fedavg, 100 * weights.weights, hover)
    if plain:
        who = f"{listed(plain)}: every" if len(drawn.groups) > 1 else "Every"
        drawn.findings = [f"{who} client counts exactly as in FedAvg."]
    drawn.layout = charts.square(top, "mean weight that FedAvg would give", "mean weight given", rangemode="tozero")
    drawn.height = 340


def _same_mix(group: Group) -> Hashable:
    target = group.first.target
    return group.first.class_names, None if target is None else target.tobytes()


@figure(DATA, "The label mix that trained the model", "Outlined: the labels of all clients together.", alike=_same_mix)
def _mixes(drawn: Figure) -> None:
    names = drawn.members[0].first.class_names
    axis, drawn.layout, drawn.height = charts.class_axes(len(names), "share of the label mix")
    other, direction = ("x", "h") if axis == "y" else ("y", "v")
    rows = charts.categories(names, "class")
    for group in drawn.members:
        mixes = [mix for run in group.seeds if (mix := run.effective_mix()) is not None]
        if mixes:
            drawn.add(group, class_dots(group, axis, rows, 100 * np.mean(mixes, axis=0)), seeds=len(mixes))
    if not drawn.shown and any(group.first.rounds for group in drawn.members):
        return
    trained = bool(drawn.shown)
    if trained:
        drawn.caption = (
            "Markers: the labels of the clients that trained, counted with the weight of their update; mean over "
            f"rounds and seeds. {drawn.caption}"
        )
    else:
        drawn.title = "The label mix"
        drawn.shown = [(group, len(group.seeds)) for group in drawn.members]

    def bars(name: str, mixes: list[FloatArray], ink: str) -> charts.Trace:
        # outlines of many bars merge
        steps = {"type": "scatter", "mode": "lines", "line": {"shape": "hvh", "width": 1}}
        kind = steps if axis == "x" and ink == "line" else {"type": "bar", "orientation": direction}
        shares = {axis: rows, other: charts.numbers(100 * np.mean(mixes, axis=0), 2)}
        return {**kind, "name": name, **shares, "hovertemplate": f"%{{{other}:.1f}} %", "meta": {"ink": ink}}

    runs = [run for group in drawn.members for run in group.seeds]
    pooled = bars("all clients together", [label_shares(run.counts.sum(axis=0)) for run in runs], "line")
    drawn.traces.insert(0, pooled)
    targets = [run.target for run in runs if run.target is not None]
    if targets:  # a target client's mix differs between seeds
        drawn.traces.insert(0, bars("target", targets, "area"))
        drawn.caption += " Grey: the target mix"
        drawn.caption += "; where the markers lie at its edge, training saw the target's mix." if trained else "."
    drawn.layout |= {"barmode": "overlay", "bargap": 0.15}
