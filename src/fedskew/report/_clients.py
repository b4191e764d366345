"""Figures of the clients: what they hold, how often they are asked, how much they count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedskew.labels import FEW_TOGETHER, ClassPairs
from fedskew.report._charts import MANY, Chart, Trace, categories, numbers, text
from fedskew.report._groups import (
    Group,
    alike,
    listed,
    number,
    one_seed,
    same_cohorts,
    same_data,
    titled,
    together,
)
from fedskew.report._panel import Panel
from fedskew.report._runs import mean_weights
from fedskew.report.drawing import FloatArray

_CELLS = 120_000
_MOST_BARS = 200
_BARS = 60  # height of the clients' sizes above the map, in pixels
_MOST_MARKERS = 1000


def holdings_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return who holds what, a figure for all groups that share it."""
    for members in alike(groups, lambda group: same_data(group)):
        yield _holdings(members, groups)


def _holdings(members: list[Group], groups: list[Group]) -> Panel:
    run = members[0].first
    counts, names = run.counts, run.class_names
    digits = 2 if np.any(counts % 1) else 0
    title = titled("Who holds what", members, groups)
    held = np.count_nonzero(counts, axis=1)
    finding = (
        f"{len(counts):,} clients, {counts.sum():,.12g} samples, {len(names)} classes; a client holds {held.min()} to "
        f"{held.max()} of the classes, {np.median(held):g} in the median."
    )
    columns, cells = categories(run.client_names, "client"), counts.astype(np.float64)
    each = -(-len(counts) // max(_CELLS // len(names), 100))
    orders = {}
    if each > 1:
        cells, columns = _blocks(counts, each)
    else:
        orders = {name: [columns[at] for at in order] for name, order in _client_orders(counts).items()}
    sizes = cells.sum(axis=1)
    traces: list[Trace] = [
        {
            "type": "heatmap",
            "x": columns,
            "y": categories(names, "class"),
            "z": [[value or None for value in row] for row in numbers(cells.T, digits if each == 1 else 1)],
            "hovertemplate": "%{x}, %{y}: %{customdata:,} samples<extra></extra>",
            "meta": {"kind": "count"},
            "colorbar": {"thickness": 12, "outlinewidth": 0},
        },
        {
            "type": "bar",
            "x": columns,
            "y": numbers(sizes, digits if each == 1 else 1),
            "yaxis": "y2",
            "hovertemplate": "%{x}: %{y:,} samples<extra></extra>",
            "meta": {"ink": "area"},
        },
    ]
    tall = 20 * len(names) if len(names) <= MANY else 400
    top = tall / (tall + 12 + _BARS)
    layout = {
        "xaxis": {"type": "category", "automargin": True, "anchor": "y"} | ({"nticks": 12} if each > 1 else {}),
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed", "domain": [0, top]},
        "yaxis2": {"domain": [1 - top * _BARS / tall, 1], "nticks": 3, "anchor": "x"},
        "bargap": 0.1,
        "hovermode": "closest",
    }
    caption = (
        "One column a client, one row a class: the stronger the colour, the more samples; blank is none. A column "
        "with few coloured cells is a client that knows few classes. On top, all samples of a client."
    )
    if each > 1:
        caption += f" Clients stand by their largest class, {each} to a column, which shows their mean."
    chart = Chart(traces, layout, tall + _BARS + 112, "x" if orders else "", orders)
    return Panel(title, chart, f"{title}: {finding}", caption, one_seed(members), [finding], wide=True)


_PAIRED = 60  # classes whose pairs are drawn


def pair_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return how many samples clients have for telling two classes apart, where some pair has few."""
    for members in alike(groups, same_data):
        run = members[0].first
        pairs = ClassPairs.of(run.counts) if run.counts.any() else None
        if pairs is None or len(run.counts) < 2 or not len(pairs.under(FEW_TOGETHER)) or len(pairs.together) > _PAIRED:
            continue
        rows = categories(run.class_names, "class")
        occurs = np.diagonal(pairs.together) > 0
        shown = np.where(np.tril(np.outer(occurs, occurs), -1), pairs.together, np.nan)
        trace: Trace = {
            "type": "heatmap",
            "x": rows,
            "y": rows,
            "z": numbers(shown, 2 if np.any(pairs.together % 1) else 0),
            "hovertemplate": "%{y} and %{x}: %{customdata:,} samples<extra></extra>",
            "meta": {"kind": "count"},
            "colorbar": {"thickness": 12, "outlinewidth": 0},
        }
        names = {"type": "category", "automargin": True}
        layout = {"xaxis": names, "yaxis": names | {"autorange": "reversed"}}
        title = titled("Classes that clients hold together", members, groups)
        caption = (
            "One cell a pair of classes: the smaller of a client's two counts, summed over clients. Losses that "
            "compare the classes of one client tell two classes apart by these samples; blank, or pale, is hardly ever."
        )
        finding = pairs.in_words(run.class_names)
        yield Panel(title, Chart([trace], layout, 420), f"{title}: {len(rows)} classes.", caption, one_seed(members),
                    [finding] if finding else [])  # fmt: skip


def _client_orders(counts: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    return {
        "as in the data": np.arange(len(counts)),
        "by largest class": _by_largest_class(counts),
        "most samples first": np.argsort(-counts.sum(axis=1), kind="stable"),
        "fewest classes first": np.argsort(np.count_nonzero(counts, axis=1), kind="stable"),
    }


def _by_largest_class(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return np.lexsort((-shares.max(axis=1), shares.argmax(axis=1), counts.sum(axis=1) == 0))


def _blocks(counts: NDArray[np.int64], each: int) -> tuple[FloatArray, list[str]]:
    """Return the mean counts of so many clients each, by largest class, and a name for each block."""
    starts = np.arange(0, len(counts), each)
    ends = np.append(starts[1:], len(counts))
    summed = np.add.reduceat(counts[_by_largest_class(counts)].astype(np.float64), starts, axis=0)
    return summed / (ends - starts)[:, None], [
        f"clients {start + 1:,} to {end:,}" for start, end in zip(starts, ends, strict=True)
    ]


def participation_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return how often each client was chosen, once for groups that chose the same ones, and who never was."""
    rows: list[tuple[list[Group], FloatArray, FloatArray]] = []
    findings = []
    for members in alike(groups, lambda group: (same_data(group), same_cohorts(group))):
        run = members[0].first
        trained = [record for record in run.rounds if record.round > 0]
        if not trained:
            continue
        clients = len(run.counts)
        chosen = _times([record.cohort for record in trained], clients)
        failed = _times([record.diverged for record in trained], clients)
        rows.append((members, chosen / len(trained), failed / len(trained)))
        label = listed(group.label for group in members) + ": " if len(groups) > 1 else ""
        if len(members) > 1:
            findings.append(f"The same clients in every round: {listed((group.label for group in members), 36)}.")
        findings += [
            label + found if label else found[0].upper() + found[1:]
            for found in _never(members[0], chosen, len(trained))
        ]
        findings += [
            f"{group.label}: {who} client{'s' if who > 1 else ''} diverged, {times} times in all."
            for group in members
            if (times := sum(len(record.diverged) for record in group.first.rounds))
            and (who := len({client for record in group.first.rounds for client in record.diverged}))
        ]
    if not rows:
        return
    title = "How often each client took part"
    spans = [
        f"{together(members)} {number(100 * chosen.min(), '%')} to {number(100 * chosen.max(), '%')}"
        for members, chosen, _ in rows
    ]
    many = max(len(chosen) for _, chosen, _ in rows) > _MOST_BARS
    caption = (
        "How many clients were chosen in which share of the rounds. The bar at 0 % was never asked."
        if many
        else "One bar a client: the share of rounds in which it was chosen. Dashed: the mean."
    )
    if any(failed.any() for _, _, failed in rows) and not many:
        caption += " Outlined: the rounds in which it diverged and was left out."
    chart = _histogram(rows) if many else _bars(rows)
    alt = f"{title}, share of rounds: {', '.join(spans)}."
    yield Panel(title, chart, alt, caption, one_seed([members[0] for members, _, _ in rows]), findings)


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


def _bars(rows: list[tuple[list[Group], FloatArray, FloatArray]]) -> Chart:
    traces: list[Trace] = []
    orders: dict[str, list[str]] = {}
    for at, (members, chosen, failed) in enumerate(rows):
        names = categories(members[0].first.client_names, "client")
        kinds: list[tuple[str, FloatArray, Trace]] = [("chosen", chosen, {"look": members[0].style, "bar": True})]
        if failed.any():
            kinds.append(("diverged", failed, {"ink": "line"}))
        traces += [
            {
                "type": "bar",
                "name": kind,
                "x": names,
                "y": numbers(100 * values, 2),
                "hovertemplate": f"%{{x}}: {kind} in %{{y:.1f}} % of the rounds<extra></extra>",
                "meta": meta | {"pick": at, "level": float(100 * chosen.mean())},
            }
            for kind, values, meta in kinds
        ]
        if len(rows) == 1:
            ways = {"as in the data": np.arange(len(chosen)), "least often first": np.argsort(chosen, kind="stable")}
            orders = {name: [names[at] for at in order] for name, order in ways.items()}
    layout = {
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"ticksuffix": " %", "rangemode": "tozero", "nticks": 5},
        "barmode": "overlay",
        "bargap": 0.15,
        "hovermode": "closest",
    }
    return Chart(traces, layout, 300, "x" if orders else "", orders, _picks(rows))


def _histogram(rows: list[tuple[list[Group], FloatArray, FloatArray]]) -> Chart:
    traces: list[Trace] = []
    for at, (members, chosen, _) in enumerate(rows):
        times, clients = np.unique(np.round(100 * chosen, 2), return_counts=True)
        traces.append(
            {
                "type": "bar",
                "x": numbers(times, 2),
                "y": clients.tolist(),
                "hovertemplate": "%{y:,} clients in %{x:.1f} % of the rounds<extra></extra>",
                "meta": {"look": members[0].style, "bar": True, "pick": at},
            }
        )
    layout = {
        "xaxis": {"title": {"text": "share of the rounds"}, "ticksuffix": " %", "nticks": 6},
        "yaxis": {"title": {"text": "clients"}, "nticks": 5},
        "bargap": 0.05,
        "hovermode": "closest",
    }
    return Chart(traces, layout, 300, picks=_picks(rows))


def _picks(rows: list[tuple[list[Group], FloatArray, FloatArray]]) -> list[str]:
    return [together(members) for members, _, _ in rows] if len(rows) > 1 else []


def _times(lists: Sequence[Sequence[int]], clients: int) -> FloatArray:
    """Count how often each client is in these lists."""
    ids = np.array([client for clients_ in lists for client in clients_], dtype=np.int64)
    return np.bincount(ids, minlength=clients).astype(np.float64)


def weight_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return how much each client counts beside FedAvg's weights."""
    found = [(group, mean_weights(group.first)) for group in groups]
    shown = [(group, weights) for group, weights in found if len(weights.clients)]
    if not shown:
        return
    title = "How much each client counts"
    caption = (
        "One marker a client, mean over the rounds that it took part in. On the dashed diagonal it counts as in "
        "FedAvg, by its number of samples; above it counts more, below less."
    )
    traces: list[Trace] = []
    plain: list[Group] = []
    top = 1e-9
    for group, weights in shown:
        count = len(weights.clients)
        if np.allclose(weights.given, weights.fedavg, rtol=1e-6, atol=1e-12):
            plain.append(group)
        if count > _MOST_MARKERS and "evenly drawn" not in caption:
            caption += f" {_MOST_MARKERS:,} of the clients, evenly drawn."
        part = np.unique(np.linspace(0, count - 1, min(count, _MOST_MARKERS)).astype(np.int64))
        names = group.first.client_names
        top = max(top, 100 * float(weights.fedavg.max()))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": text(group.label),
                "x": numbers(100 * weights.fedavg[part]),
                "y": numbers(100 * weights.given[part]),
                "customdata": [text(names[at]) for at in weights.clients[part]],
                "hovertemplate": "%{customdata}: %{y:.3g} %, FedAvg %{x:.3g} %",
                "meta": {"look": group.style, "runs": [group.style], "cloud": True},
            }
        )
    findings = []
    if plain:
        who = f"{listed(group.label for group in plain)}: every" if len(groups) > 1 else "Every"
        findings.append(f"{who} client counts exactly as in FedAvg.")
    ends = {"ticksuffix": " %", "rangemode": "tozero", "nticks": 6}
    layout = {
        "xaxis": ends | {"title": {"text": "mean weight that FedAvg would give"}},
        "yaxis": ends | {"title": {"text": "mean weight given"}},
        "shapes": [{"type": "line", "x0": 0, "y0": 0, "x1": top, "y1": top, "line": {"dash": "dash", "width": 1}}],
        "hovermode": "closest",
    }
    alt = f"{title}: mean weight against FedAvg's, {', '.join(group.label for group, _ in shown)}."
    yield Panel(title, Chart(traces, layout, 340), alt, caption, one_seed([group for group, _ in shown]), findings)
