"""Figures of the clients: what they hold, how often they are asked, how much they count; the target's mix."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedskew.labels import ClassPairs
from fedskew.metrics import SiteRow
from fedskew.report import _charts as charts
from fedskew.report._runs import Group, label_shares, listed, same_cohorts, same_data, together
from fedskew.report._sites import ClientTable
from fedskew.report.drawing import FloatArray
from fedskew.tables import counted, grouped

_CELLS = 120_000
_MOST_BARS = 200
_BARS = 60  # height of the clients' sizes above the map, in pixels
_PAIRED = 60  # classes whose pairs are drawn
_STEPS = ("alone", "common", "personal")  # the way of a client's line
_SHAPES = ("circle", "square", "diamond", "triangle")  # as `report.js` has them
_MODELS = {
    "alone": "its own model alone",
    "common": "the common model",
    "personal": "its personal model",
    "pooled": "the model of all clients' samples in one place",
}


def _digits(counts: NDArray[Any]) -> int:
    """Return the decimals of label counts: noisy ones have some."""
    return 2 if np.any(counts % 1) else 0


@charts.figure(
    charts.DATA,
    "Who holds what",
    "One column a client, one row a class: the stronger the colour, the more samples; blank is none. A column with few "
    "coloured cells is a client that knows few classes. On top, all samples of a client.",
    alike=same_data,
    one_seed=True,
    wide=True,
)
def _holdings(drawn: charts.Figure) -> None:
    whose = drawn.members[0]
    run = whose.first
    counts, names, samples = run.counts, run.class_names, run.samples
    held = np.count_nonzero(counts, axis=1)
    drawn.findings = [
        f"{counted(len(counts), 'client')}, {samples.sum():,.12g} {'sample' if samples.sum() == 1 else 'samples'}, "
        f"{counted(len(names), 'class', 'classes')}; a client holds {held.min()} to {held.max()} of the classes, "
        f"{np.median(held):g} in the median."
    ]
    columns, digits, rows = charts.categories(run.client_names, "client"), _digits(counts), charts.class_names(whose)
    shares = label_shares(counts)
    by_class = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1), samples == 0))
    each = -(-len(counts) // max(_CELLS // len(names), 100))
    if each > 1:
        starts = range(0, len(counts), each)
        columns = [f"clients {start + 1:,} to {min(start + each, len(counts)):,}" for start in starts]
        counts, digits = charts.mean_of_blocks(counts[by_class].astype(np.float64), each), 1
        samples = charts.mean_of_blocks(samples[by_class].astype(np.float64), each)
        drawn.caption += f" Clients stand by their largest class, {each} to a column, which shows their mean."
    else:
        ways = {"by largest class": np.argsort(by_class), "most samples first": -samples, "fewest classes first": held}
        drawn.order_by("x", columns, ways)
    cells = [[value or None for value in row] for row in charts.numbers(counts.T, digits)]
    sizes = charts.bars(columns, charts.numbers(samples, digits), "%{x}: %{y:,} samples", ink="area")
    hover = "%{x}, %{y}: %{customdata:,} samples"
    drawn.add(whose, charts.heat_map(columns, rows, cells, hover), sizes | {"yaxis": "y2"})
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


@charts.figure(
    charts.DATA,
    "Classes that clients hold together",
    "One cell a pair of classes: the smaller of a client's two counts, summed over clients. Losses that compare the "
    "classes of one client tell two classes apart by these samples; blank, or pale, is hardly ever.",
    alike=same_data,
    one_seed=True,
)
def _pairs(drawn: charts.Figure) -> None:
    run = drawn.members[0].first
    if len(run.counts) < 2 or len(run.class_names) > _PAIRED or not run.counts.any():
        return
    pairs = ClassPairs.of(run.counts)
    if not len(pairs.under(pairs.few)):
        return
    rows = charts.class_names(drawn.members[0])
    occurs = np.diagonal(pairs.together) > 0
    cells = np.where(np.tril(np.outer(occurs, occurs), -1), pairs.together, np.nan)
    hover = "%{y} and %{x}: %{customdata:,} samples"
    drawn.add(drawn.members[0], charts.heat_map(rows, rows, charts.numbers(cells, _digits(pairs.together)), hover))
    if words := pairs.in_words(run.class_names):
        drawn.findings = [f"{words[0].upper()}{words[1:]}."]
    drawn.layout, drawn.height = {"xaxis": charts.CATEGORY, "yaxis": charts.DOWN}, 420


@charts.figure(charts.DATA, "How often each client took part", "", one_seed=True, by_run=True)
def _participation(drawn: charts.Figure) -> None:
    """Draw how often each client was chosen, once for groups that chose the same ones; name who never was."""
    rows: list[tuple[list[Group], FloatArray]] = []
    for members in grouped(drawn.groups, lambda group: (same_data(group), same_cohorts(group))).values():
        run = members[0].first
        rounds = sum(record.round > 0 for record in run.rounds)
        if not any(record.cohort for record in run.rounds):
            continue
        chosen = _times([record.cohort for record in run.rounds], len(run.counts))
        rows.append((members, 100 * chosen / rounds))
        if len(members) > 1:
            same = listed((group.label for group in members), 36)
            drawn.findings.append(f"The same clients in every round: {same}.")
        label = drawn.about(*members)
        for found in _never(members[0], chosen, rounds):
            drawn.findings.append(label + found if label else found[0].upper() + found[1:])
        for group in members:
            if lost := [client for record in group.first.rounds for client in record.diverged]:
                who = counted(len(set(lost)), "client")
                drawn.findings.append(f"{group.label}: {who} diverged, {counted(len(lost), 'time')} in all.")
    many = max((len(shares) for _, shares in rows), default=0) > _MOST_BARS
    for members, shares in rows:
        drawn.description.append(f"{together(members)} {' to '.join(map(charts.number, (shares.min(), shares.max())))}")
        look = {"look": members[0].style, "bar": True}
        if many:
            times, clients = np.unique(np.round(shares, 2), return_counts=True)
            hover = "%{y:,} clients in %{x:.1f} % of the rounds"
            trace = charts.bars(charts.numbers(times, 2), clients.tolist(), hover, **look)
        else:
            names = charts.categories(members[0].first.client_names, "client")
            hover, level = "%{x}: chosen in %{y:.1f} % of the rounds", float(shares.mean())
            trace = charts.bars(names, charts.numbers(shares, 2), hover, level=level, **look)
        drawn.add(members[0], trace, name=together(members))
    drawn.height = 300
    drawn.layout = {"bargap": 0.1, "hovermode": "closest"}
    if many:
        drawn.caption = "How many clients were chosen in which share of the rounds. The bar at 0 % was never asked."
        clients_axis = {"title": {"text": "clients"}, "nticks": 5}
        drawn.layout |= {"xaxis": charts.percent("share of the rounds"), "yaxis": clients_axis}
        return
    drawn.caption = "One bar a client: the share of rounds in which it was chosen. Dashed: the mean."
    if len(rows) == 1:
        drawn.order_by("x", drawn.traces[0]["x"], {"least often first": rows[0][1]})
    drawn.layout |= {"xaxis": charts.CATEGORY, "yaxis": charts.percent(rangemode="tozero", nticks=5)}


@charts.figure(charts.SITES, "What each client gets", "", by_run=True, wide=True)
def _worth(drawn: charts.Figure) -> None:
    """Draw a line for each client from its model alone to the common and to its personal one; name who loses."""
    tables = [(group, table) for group in drawn.groups if (table := ClientTable.of(group.seeds)).rows]
    if not tables:
        return
    kinds = [kind for kind in SiteRow.ROWS if any(kind in table.kinds for _, table in tables)]
    many = max(len(table.names) for _, table in tables) > charts.MANY
    drawn.axis, across = ("x", "y") if many else ("y", "x")
    drawn.height = 380 if many else 110 + 22 * max(len(table.names) for _, table in tables)
    for group, table in tables:
        values = {kind: 100 * table.values(kind, "accuracy") for kind in kinds}
        first = [values[kind] for kind in _STEPS if kind in table.kinds] or [values["pooled"]]
        order = np.argsort((first[0] if len(first) > 1 else 0) - first[-1], kind="stable")
        names = charts.categories([table.names[at] for at in order], "client")
        steps = np.stack([*first, np.full(len(order), np.nan)], axis=1)[order]
        lines = {drawn.axis: np.repeat(names, steps.shape[1]).tolist(), across: charts.numbers(steps.ravel(), 2)}
        thin = {"type": "scatter", "mode": "lines", "line": {"width": 1}, "hoverinfo": "skip", "meta": {"ink": "line"}}
        traces: list[charts.Trace] = [thin | lines]
        for look, kind in enumerate(kinds):
            points = {drawn.axis: names, across: charts.numbers(values[kind][order], 2)}
            hover = f"%{{{drawn.axis}}}: %{{{across}:.1f}} %<extra>{kind}</extra>"
            markers = {"type": "scatter", "mode": "markers", "name": kind, "hovertemplate": hover}
            traces.append(markers | {"meta": {"look": look}} | points)
        drawn.add(group, *traces, seeds=len(group.seeds))
        drawn.findings += [drawn.about(group) + gain.in_words() for gain in table.gains("accuracy")]
    looks = ", ".join(f"{shape} {_MODELS[kind]}" for shape, kind in zip(_SHAPES, kinds, strict=False))
    drawn.caption = (
        f"One line a client, by its own test samples; whose last model gains most over its first stands first: {looks}."
    )
    axis = charts.percent("accuracy") | ({} if many else {"side": "top"})
    named = charts.CATEGORY | {"nticks": 16} if many else charts.DOWN
    drawn.layout = {f"{drawn.axis}axis": named, f"{across}axis": axis, "hovermode": "closest"}


def _never(group: Group, chosen: FloatArray, rounds: int) -> Iterator[str]:
    run = group.first
    never = np.flatnonzero(chosen == 0)
    sizes = run.samples
    if len(never):
        names = [f"client {name}" if name.isdecimal() else name for name in run.client_names]
        share = sizes[never].sum() / max(sizes.sum(), 1)
        others = np.delete(run.counts, never, axis=0).sum(axis=0)
        lost = np.flatnonzero((others == 0) & (run.counts.sum(axis=0) > 0))
        only = f"; nobody else holds {listed(run.class_names[at] for at in lost)}" if len(lost) else ""
        yield (
            f"never asked in {counted(rounds, 'round')}: {listed(names[at] for at in never)} "
            f"({len(never):,} of {len(chosen):,} clients, {100 * share:.1f} % of the samples{only})."
        )
    answered = _times([record.answered for record in run.rounds], len(chosen))
    if len(silent := np.flatnonzero((chosen > 0) & (answered == 0))):
        yield f"asked, but no update of theirs ever counted: {listed(run.client_names[at] for at in silent)}."


def _times(lists: Sequence[Sequence[int]], clients: int) -> FloatArray:
    ids = np.array([client for chosen in lists for client in chosen], dtype=np.int64)
    return np.bincount(ids, minlength=clients).astype(np.float64)


@charts.figure(
    charts.DATA,
    "How much each client counts",
    "One marker a client, mean over the rounds that it took part in. On the dashed diagonal it counts as in FedAvg, by "
    "its number of samples; above it counts more, below less.",
    one_seed=True,
)
def _weights(drawn: charts.Figure) -> None:
    plain = []
    top = 1e-9
    for group in drawn.groups:
        clients, weights, fedavg = group.first.mean_weights()
        if not len(clients):
            continue
        if np.allclose(weights, fedavg, rtol=1e-6, atol=1e-12):
            plain.append(group.label)
        top = max(top, 100 * float(fedavg.max()))
        hover = "%{customdata}: %{y:.3g} %, FedAvg %{x:.3g} %"
        drawn.add_cloud(group, clients, 100 * fedavg, 100 * weights, hover)
    if plain:
        who = f"{listed(plain)}: every" if len(drawn.groups) > 1 else "Every"
        drawn.findings = [f"{who} client counts exactly as in FedAvg."]
    drawn.square(top, "mean weight that FedAvg would give", "mean weight given", rangemode="tozero")


def _same_mix(group: Group) -> Hashable:
    target = group.first.target
    return group.first.class_names, None if target is None else target.tobytes()


@charts.figure(
    charts.DATA,
    "The label mix that trained the model",
    "Outlined: the labels of all clients together.",
    alike=_same_mix,
)
def _mixes(drawn: charts.Figure) -> None:
    rows = drawn.by_class("share of the label mix")
    for group in drawn.members:
        mixes = [mix for run in group.seeds if (mix := run.effective_mix()) is not None]
        if mixes:
            drawn.add_classes(group, 100 * np.mean(mixes, axis=0), len(mixes))
    trained = bool(drawn.shown)
    if trained:
        drawn.caption = (
            "Markers: the labels of the clients that trained, counted with the weight of their update; mean over "
            f"rounds and seeds. {drawn.caption}"
        )
    elif any(group.first.rounds for group in drawn.members):
        return
    else:
        drawn.title = "The label mix"
        drawn.shown = [(group, len(group.seeds)) for group in drawn.members]

    def bars(name: str, mixes: list[FloatArray], ink: str) -> charts.Trace:
        values, direction = ("x", "h") if drawn.axis == "y" else ("y", "v")
        # outlines of many bars merge
        steps = {"type": "scatter", "mode": "lines", "line": {"shape": "hvh", "width": 1}}
        kind = steps if drawn.axis == "x" and ink == "line" else {"type": "bar", "orientation": direction}
        shares = {drawn.axis: rows, values: charts.numbers(100 * np.mean(mixes, axis=0), 2)}
        return {**kind, "name": name, **shares, "hovertemplate": f"%{{{values}:.1f}} %", "meta": {"ink": ink}}

    runs = [run for group in drawn.members for run in group.seeds]
    pooled = bars("all clients together", [label_shares(run.counts.sum(axis=0)) for run in runs], "line")
    drawn.traces.insert(0, pooled)
    targets = [run.target for run in runs if run.target is not None]
    if targets:  # a target client's mix differs between seeds
        drawn.traces.insert(0, bars("target", targets, "area"))
        drawn.caption += " Grey: the target mix"
        drawn.caption += "; where the markers lie at its edge, training saw the target's mix." if trained else "."
    drawn.layout |= {"barmode": "overlay", "bargap": 0.15}
    drawn.axis = ""
