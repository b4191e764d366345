"""Figures of the classes: how well each is known, by whom it is held, what it is taken for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from fedskew.engine import Evaluation
from fedskew.report import _charts
from fedskew.report._charts import Chart, Trace, categories, numbers, text
from fedskew.report._groups import Group, alike, mean_and_std, number, one_seed, seeds_of, titled
from fedskew.report._panel import Panel
from fedskew.report._runs import SeedRun, effective_mix, label_shares
from fedskew.report.drawing import Curve, FloatArray

_CELLS = 300_000  # of all heat maps of classes by rounds together; a page stays small and quick with so many
_MOST_ROUNDS = 120
_CONFUSED = 60  # classes of a confusion matrix: more can't be told apart
_MOST_CLIENTS = 1000
_NAMED = 8  # runs in one sentence
_SCALE = {"colorscale": "Viridis", "zmin": 0, "zmax": 100}


def class_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return the figures of the classes."""
    for members in alike(groups, lambda group: group.first.class_names):
        yield from _class_by_round(members, groups)
        yield from _final(members, groups)
        yield from _confusion(members, groups)
    yield from _by_client(groups)


def last_evaluation(run: SeedRun) -> Evaluation | None:
    """Return the last evaluation of a run; None where there is none."""
    return next((record.evaluation for record in reversed(run.rounds) if record.evaluation is not None), None)


def _final_per_class(run: SeedRun) -> FloatArray | None:
    found = last_evaluation(run)
    return None if found is None else np.array(found.per_class, dtype=np.float64)  # None becomes NaN


def _class_by_round(members: list[Group], groups: list[Group]) -> Iterator[Panel]:
    names = members[0].first.class_names
    columns = int(np.clip(_CELLS // (len(groups) * len(names)), 8, _MOST_ROUNDS))
    rows = categories(names, "class")
    traces: list[Trace] = []
    shown: list[tuple[Group, int]] = []
    last: FloatArray | None = None
    for group in members:
        found = _rounds_and_accuracies(group, columns)
        if found is None:
            continue
        rounds, accuracies, seeds = found
        traces.append(
            {
                "type": "heatmap",
                "x": numbers(rounds, 1),
                "y": rows,
                "z": numbers(100 * accuracies.T, 1),
                "hovertemplate": "%{y}, round %{x}: %{z:.1f} %<extra></extra>",
                "colorbar": {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
                "meta": {"pick": len(shown)},
                **_SCALE,
            }
        )
        shown.append((group, seeds))
        last = accuracies[-1] if last is None else last
    if last is None:
        return
    many = len(names) > _charts.MANY
    layout = {
        "xaxis": {"title": {"text": "round"}},
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
    }
    orders = _orders(members[0], rows, last, f"accuracy of {members[0].label}" if len(groups) > 1 else "accuracy")
    chart = Chart(traces, layout, 480 if many else 120 + 24 * len(names), "y", orders, _picks(shown))
    title = titled("Every class, round by round", members, groups)
    caption = (
        "One row a class, one column a round: how many of the class's test samples the model gets right. A row that "
        "goes dark after some rounds is a class that was forgotten when nobody who trained held it."
    )
    if max(seeds for _, seeds in shown) > 1:
        caption += " Mean over seeds."
    yield Panel(title, chart, f"{title}: accuracy of {len(names)} classes.", caption, seeds_of(shown), wide=True)


def _rounds_and_accuracies(group: Group, most: int) -> tuple[FloatArray, FloatArray, int] | None:
    """Return rounds, per-class accuracies (rounds, classes) as means over seeds, and the number of seeds."""
    found: dict[int, list[list[float | None]]] = {}
    for run in group.seeds:
        for record in run.rounds:
            if record.evaluation is not None:
                found.setdefault(record.round, []).append(record.evaluation.per_class)
    if not found:
        return None
    seeds = max(map(len, found.values()))
    rounds = [at for at in sorted(found) if len(found[at]) == seeds]  # a mean of fewer seeds would jump
    accuracies = np.array([np.array(found[at], dtype=np.float64).mean(axis=0) for at in rounds])
    block = -(-len(rounds) // most)
    starts = np.arange(0, len(rounds), block)
    lengths = np.diff(np.append(starts, len(rounds)))
    return (
        np.add.reduceat(np.array(rounds, dtype=np.float64), starts) / lengths,
        np.add.reduceat(accuracies, starts, axis=0) / lengths[:, None],
        seeds,
    )


def _final(members: list[Group], groups: list[Group]) -> Iterator[Panel]:
    names = members[0].first.class_names
    axis, layout, height = _charts.class_axes(len(names), "accuracy")
    rows = categories(names, "class")
    traces: list[Trace] = []
    shown: list[tuple[Group, int]] = []
    worst = []
    means = []
    for group in members:
        finals = [final for run in group.seeds if (final := _final_per_class(run)) is not None]
        if not finals:
            continue
        mean, std = mean_and_std(100 * np.array(finals))
        means.append(mean)
        shown.append((group, len(finals)))
        traces.append(_dots(group, axis, rows, mean, std, _held_by(group)))
        if np.isfinite(mean).any():
            lowest = np.flatnonzero(mean == np.nanmin(mean))
            others = f" and {len(lowest) - 1} more" if len(lowest) > 1 else ""
            named = f"{names[lowest[0]]}{others} ({number(mean[lowest[0]], '%')})"
            worst.append(f"{group.label}: {named}" if len(groups) > 1 else named)
    if not shown:
        return
    more = f"; and of {len(worst) - _NAMED} more runs" if len(worst) > _NAMED else ""
    finding = f"Worst class: {'; '.join(worst[:_NAMED]) or 'none was tested'}{more}."
    title = titled("Accuracy by class", members, groups)
    caption = f"The last evaluated model on each class, one {'row' if axis == 'y' else 'column'} a class."
    if any(seeds > 1 for _, seeds in shown):
        caption += " Whiskers: one standard deviation over seeds to each side."
    first = f"accuracy of {shown[0][0].label}" if len(groups) > 1 else "accuracy"
    layout = layout | {"hovermode": f"{axis} unified"}
    values = "xaxis" if axis == "y" else "yaxis"
    layout[values] = layout[values] | {"range": [-3, 103]}
    if axis == "y":
        layout["yaxis"] = layout["yaxis"] | {"autorange": "reversed"}
    chart = Chart(traces, layout, height, axis, _orders(shown[0][0], rows, means[0], first))
    yield Panel(title, chart, f"{title}. {finding}", caption, seeds_of(shown), [finding])


def _dots(
    group: Group, axis: str, rows: list[str], mean: FloatArray, std: FloatArray | None, notes: list[str] | None = None
) -> Trace:
    """Return a marker for each class; `notes` stand behind the value that the reader points at."""
    other = "x" if axis == "y" else "y"
    customdata = {} if notes is None else {"customdata": notes}
    behind = "" if notes is None else ", %{customdata}"
    errors = {} if std is None else {f"error_{other}": {"array": numbers(std, 2), "thickness": 1, "width": 0}}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": text(group.label),
        axis: rows,
        other: numbers(mean, 2),
        "hovertemplate": f"%{{{other}:.1f}} %{behind}",
        "meta": {"look": group.style, "runs": [group.style], "small": axis == "x"},
        **customdata,
        **errors,
    }


def _held_by(group: Group) -> list[str]:
    """Say of each class how many clients hold it, and how many samples they have."""
    counts = group.first.counts
    holders, samples = np.count_nonzero(counts, axis=0), counts.sum(axis=0)
    return [f"held by {who:,} of {len(counts):,} ({number:,})" for who, number in zip(holders, samples, strict=True)]


def _orders(group: Group, rows: list[str], accuracies: FloatArray, by: str) -> dict[str, list[str]]:
    counts = group.first.counts
    ways = {
        "as in the data": np.arange(len(rows)),
        f"{by}, lowest first": np.argsort(accuracies, kind="stable"),
        "held by fewest clients first": np.argsort(np.count_nonzero(counts, axis=0), kind="stable"),
        "fewest samples first": np.argsort(counts.sum(axis=0), kind="stable"),
    }
    return {name: [rows[at] for at in order] for name, order in ways.items()}


def _picks(shown: list[tuple[Group, int]]) -> list[str]:
    return [group.label for group, _ in shown] if len(shown) > 1 else []


def _confusion(members: list[Group], groups: list[Group]) -> Iterator[Panel]:
    names = members[0].first.class_names
    rows = categories(names, "class")
    traces: list[Trace] = []
    shown: list[tuple[Group, int]] = []
    findings = []
    for group in members:
        matrices = [
            np.array(found.confusion)
            for run in group.seeds
            if (found := last_evaluation(run)) is not None and len(found.confusion) == len(names)
        ]
        if not matrices:
            continue
        counts = np.sum(matrices, axis=0)
        shares = 100 * label_shares(counts)
        part = _most_confused(counts)
        some = [rows[at] for at in part]
        traces.append(
            {
                "type": "heatmap",
                "x": some,
                "y": some,
                "z": numbers(shares[np.ix_(part, part)], 1),
                "hovertemplate": "of %{y}, %{z:.1f} % are taken for %{x}<extra></extra>",
                "colorbar": {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
                "meta": {"pick": len(shown)},
                **_SCALE,
            }
        )
        shown.append((group, len(matrices)))
        if mistakes := list(_mistakes(shares, names)):
            findings.append((f"{group.label}: " if len(groups) > 1 else "") + f"{'; '.join(mistakes)}.")
    if not shown:
        return
    title = titled("What is taken for what", members, groups)
    caption = (
        "Confusion matrix of the last evaluated model: one row a true class, its test samples shared out over the "
        "classes that the model names. The diagonal is right."
    )
    if len(names) > _CONFUSED:
        caption += f" The {_CONFUSED} classes with the most mistakes of {len(names)}."
    if max(seeds for _, seeds in shown) > 1:
        caption += " All seeds' samples together."
    layout = {
        "xaxis": {"type": "category", "automargin": True, "title": {"text": "taken for"}, "tickangle": -90},
        "yaxis": {"type": "category", "automargin": True, "title": {"text": "true class"}, "autorange": "reversed"},
    }
    chart = Chart(traces, layout, 460, picks=_picks(shown))
    notes = [f"Most often mistaken: {finding}" for finding in findings[:4]]
    yield Panel(title, chart, f"{title}: {len(names)} classes.", caption, seeds_of(shown), notes)


def _most_confused(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the classes with the most mistakes, as truth or as answer, in their own order."""
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)
    return np.sort(np.argsort(-wrong, kind="stable")[:_CONFUSED])


def _mistakes(shares: FloatArray, names: tuple[str, ...]) -> Iterator[str]:
    wrong = shares - np.diag(np.diag(shares))
    for at in np.argsort(-wrong, axis=None, kind="stable")[:3]:
        truth, answer = divmod(int(at), len(names))
        if (share := float(wrong[truth, answer])) >= 5:
            yield f"{names[truth]} for {names[answer]} ({number(share, '%')})"


def held_and_vacant(groups: list[Group]) -> Iterator[Panel]:
    """Return the accuracy on classes that a round's cohort holds, against that on those that nobody in it does."""
    traces: list[Trace] = []
    shown: list[tuple[Group, int]] = []
    ends = []
    for group in groups:
        found = [_by_cohort(run) for run in group.seeds]
        lacking = [vacant for _, vacant in found if vacant]
        if not lacking:
            continue
        shown.append((group, len(lacking)))
        for kind, dash, series in (
            ("held", "solid", [held for held, _ in found if held]),
            ("vacant", "dot", lacking),
        ):
            if not series:  # the test samples are all of classes that nobody holds
                continue
            line = Curve.over_seeds(group.style, series, 60)
            name = kind if len(groups) == 1 else f"{group.label}, {kind}"
            traces.append(
                _charts.curve(
                    name, group.style, [group.style], line.x, line.mean, line.std if kind == "vacant" else None,
                    unit="%", dash=dash,
                )
            )  # fmt: skip
            ends.append(f"{name} {number(line.mean[-1], '%')}")
    if not shown:
        return
    title = "Classes that the round's clients hold, and those that they don't"
    caption = (
        "The model right after a round: mean accuracy on the classes that some client of the round trained on (solid), "
        "and on those that none of them holds (dotted). The gap is what a round costs the classes that it has no "
        "sample of. Rounds whose cohort held every class, or that were not evaluated, have no dotted point."
    )
    alt = f"{title}, at the end: {', '.join(ends)}."
    yield Panel(title, _charts.curves(traces, "%"), alt, caption, seeds_of(shown))


def _by_cohort(run: SeedRun) -> tuple[dict[int, float], dict[int, float]]:
    """Return by round the mean accuracy, %, on the classes that the clients who trained hold, and on the others."""
    held, vacant = {}, {}
    for record in run.rounds:
        if record.evaluation is None or not record.answered:
            continue
        accuracies = 100 * np.array(record.evaluation.per_class, dtype=np.float64)
        known = np.isfinite(accuracies)
        there = run.counts[record.answered].sum(axis=0) > 0
        if (known & there).any():
            held[record.round] = float(accuracies[known & there].mean())
        if (known & ~there).any():
            vacant[record.round] = float(accuracies[known & ~there].mean())
    return held, vacant


def _by_client(groups: list[Group]) -> Iterator[Panel]:
    """Yield the final model at each client's own classes against the classes that the client lacks."""
    traces: list[Trace] = []
    shown: list[Group] = []
    sampled = 0
    for group in groups:
        final = _final_per_class(group.first)
        if final is None:
            continue
        held, vacant, clients = _at_clients(group.first.counts, 100 * final)
        if not len(clients):
            continue
        part = np.unique(np.linspace(0, len(clients) - 1, min(len(clients), _MOST_CLIENTS)).astype(np.int64))
        sampled = max(sampled, len(part) if len(part) < len(clients) else 0)
        names = group.first.client_names
        holds = np.count_nonzero(group.first.counts, axis=1)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": text(group.label),
                "x": numbers(held[part], 2),
                "y": numbers(vacant[part], 2),
                "customdata": [f"{text(names[at])}, {holds[at]} classes" for at in clients[part]],
                "hovertemplate": "%{customdata}<br>held %{x:.1f} %, vacant %{y:.1f} %",
                "meta": {"look": group.style, "runs": [group.style], "cloud": True},
            }
        )
        shown.append(group)
    if not shown:
        return
    title = "Each client's own classes, and those it never saw"
    caption = (
        "The last evaluated model, one marker a client: mean accuracy on the classes that the client holds, and on "
        "those that are vacant at it. Below the dashed diagonal, the model serves a client's own classes better."
    )
    if sampled:
        caption += f" {sampled:,} of the clients, evenly drawn."
    ends = {"range": [-2, 102], "ticksuffix": " %", "nticks": 6}
    layout = {
        "xaxis": ends | {"title": {"text": "classes it holds"}},
        "yaxis": ends | {"title": {"text": "classes vacant at it"}},
        "shapes": [{"type": "line", "x0": 0, "y0": 0, "x1": 100, "y1": 100, "line": {"dash": "dash", "width": 1}}],
        "hovermode": "closest",
    }
    alt = f"{title}: {', '.join(group.label for group in shown)}."
    yield Panel(title, Chart(traces, layout, 340), alt, caption, one_seed(shown))


def _at_clients(counts: NDArray[np.int64], accuracies: FloatArray) -> tuple[FloatArray, FloatArray, NDArray[np.int64]]:
    """Return mean accuracies on held and on vacant classes, and the clients that have both."""
    known = np.isfinite(accuracies)
    there = (counts > 0) & known
    lacking = (counts == 0) & known
    clients = np.flatnonzero(there.any(axis=1) & lacking.any(axis=1))
    values = np.where(known, accuracies, 0)
    return (
        there[clients] @ values / there[clients].sum(axis=1),
        lacking[clients] @ values / lacking[clients].sum(axis=1),
        clients,
    )


def mix_panels(groups: list[Group]) -> Iterator[Panel]:
    """Return the label mixes that trained the models, beside the target's and everybody's."""

    def kind(group: Group) -> Hashable:
        target = group.first.target
        return group.first.class_names, None if target is None else target.tobytes()

    for members in alike(groups, kind):
        yield from _mixes(members, groups)


def _mixes(members: list[Group], groups: list[Group]) -> Iterator[Panel]:
    names = members[0].first.class_names
    axis, layout, height = _charts.class_axes(len(names), "share of the label mix")
    other = "x" if axis == "y" else "y"
    rows = categories(names, "class")
    dots: list[Trace] = []
    shown: list[tuple[Group, int]] = []
    for group in members:
        mixes = [mix for run in group.seeds if (mix := effective_mix(run)) is not None]
        if mixes:
            dots.append(_dots(group, axis, rows, 100 * np.mean(mixes, axis=0), None))
            shown.append((group, len(mixes)))
    if not dots and any(group.first.rounds for group in members):
        return
    shown = shown or [(group, len(group.seeds)) for group in members]
    pooled = np.mean([label_shares(run.counts.sum(axis=0)) for group in members for run in group.seeds], axis=0)
    targets = [run.target for group in members for run in group.seeds if run.target is not None]

    def bars(name: str, values: FloatArray, ink: str) -> Trace:
        steps = {
            "type": "scatter",
            "mode": "lines",
            "line": {"shape": "hvh", "width": 1},
        }  # outlines of many bars merge
        kind = steps if axis == "x" and ink == "line" else {"type": "bar", "orientation": "h" if axis == "y" else "v"}
        return {
            **kind,
            "name": name,
            axis: rows,
            other: numbers(100 * values, 2),
            "hovertemplate": f"%{{{other}:.1f}} %",
            "meta": {"ink": ink},
        }

    traces = [bars("all clients together", pooled, "line")]
    title = titled("The label mix that trained the model" if dots else "The label mix", members, groups)
    caption = "Outlined: the labels of all clients together."
    if dots:
        caption = (
            "Markers: the labels of the clients that trained, counted with the weight of their update; mean over "
            f"rounds and seeds. {caption}"
        )
    if targets:  # a target client's mix differs between seeds
        traces.insert(0, bars("target", np.mean(targets, axis=0), "area"))
        caption += " Grey: the target mix"
        caption += "; where the markers lie at its edge, training saw the target's mix." if dots else "."
    layout = layout | {"hovermode": f"{axis} unified", "barmode": "overlay", "bargap": 0.15}
    if axis == "y":
        layout["yaxis"] = layout["yaxis"] | {"autorange": "reversed"}
    chart = Chart([*traces, *dots], layout, height)
    yield Panel(title, chart, f"{title}, by class.", caption, seeds_of(shown))
