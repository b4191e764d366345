"""Figures of the classes: how well each is known, by whom it is held, what it is taken for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedskew.report import _charts as charts
from fedskew.report._figure import CLASSES, Figure, add_cloud, class_dots, figure
from fedskew.report._groups import Group, same_classes
from fedskew.report._runs import SeedRun, label_shares
from fedskew.report.drawing import FloatArray

_CELLS = 300_000  # of all heat maps of classes by rounds together; a page stays small and quick with so many
_MOST_ROUNDS = 120
_CONFUSED = 60  # classes of a confusion matrix: more can't be told apart
_NAMED = 8  # runs in one sentence


def _final_per_class(run: SeedRun) -> FloatArray | None:
    last = run.last_evaluation
    return None if last is None else 100 * np.array(last.per_class, dtype=np.float64)  # None becomes NaN


@figure(
    CLASSES,
    "Every class, round by round",
    "One row a class, one column a round: how many of the class's test samples the model gets right. A row that goes "
    "dark after some rounds is a class that was forgotten when nobody who trained held it.",
    alike=same_classes,
    by_run=True,
    wide=True,
)
def _class_by_round(drawn: Figure) -> None:
    names = drawn.members[0].first.class_names
    columns = int(np.clip(_CELLS // (len(drawn.groups) * len(names)), 8, _MOST_ROUNDS))
    rows = charts.categories(names, "class")
    for group in drawn.members:
        by_round: dict[int, list[list[float | None]]] = {}
        for record in (record for run in group.seeds for record in run.rounds):
            if record.evaluation is not None:
                by_round.setdefault(record.round, []).append(record.evaluation.per_class)
        if not by_round:
            continue
        seeds = max(map(len, by_round.values()))
        rounds = [at for at in sorted(by_round) if len(by_round[at]) == seeds]  # a mean of fewer seeds would jump
        accuracies = np.array([np.array(by_round[at], dtype=np.float64).mean(axis=0) for at in rounds])
        each = -(-len(rounds) // columns)
        accuracies = 100 * charts.mean_of_blocks(accuracies, each)
        x = charts.numbers(charts.mean_of_blocks(np.array(rounds, dtype=np.float64), each), 1)
        if not drawn.shown:
            drawn.axis, drawn.orders = "y", _orders(drawn, group, rows, accuracies[-1])
        hover = "%{y}, round %{x}: %{z:.1f} %"
        drawn.add(group, charts.heat_map(x, rows, charts.numbers(accuracies.T, 1), hover, percent=True), seeds=seeds)
    if max((seeds for _, seeds in drawn.shown), default=0) > 1:
        drawn.caption += " Mean over seeds."
    drawn.layout = {"xaxis": {"title": {"text": "round"}}, "yaxis": charts.DOWN}
    drawn.height = 480 if len(names) > charts.MANY else 120 + 24 * len(names)


@figure(
    CLASSES,
    "Accuracy by class",
    "The last evaluated model, one row a class (one column where there are many).",
    alike=same_classes,
)
def _final(drawn: Figure) -> None:
    names = drawn.members[0].first.class_names
    drawn.axis, drawn.layout, drawn.height = charts.class_axes(len(names), "accuracy")
    rows = charts.categories(names, "class")
    worst = []
    for group in drawn.members:
        finals = [final for run in group.seeds if (final := _final_per_class(run)) is not None]
        if not finals:
            continue
        mean = np.mean(finals, axis=0)  # a class without a test sample has none in every seed
        std = np.std(finals, axis=0, ddof=1) if len(finals) > 1 else None
        if not drawn.shown:
            drawn.orders = _orders(drawn, group, rows, mean)
        counts = group.first.counts
        held = zip(np.count_nonzero(counts, axis=0), counts.sum(axis=0), strict=True)
        notes = [f"held by {who:,} of {len(counts):,} ({samples:,})" for who, samples in held]
        drawn.add(group, class_dots(group, drawn.axis, rows, mean, std, notes), seeds=len(finals))
        if np.isfinite(mean).any():
            lowest = np.flatnonzero(mean == np.nanmin(mean))
            others = f" and {len(lowest) - 1} more" if len(lowest) > 1 else ""
            worst.append(f"{drawn.about(group)}{names[lowest[0]]}{others} ({charts.number(mean[lowest[0]])})")
    more = f"; and of {len(worst) - _NAMED} more runs" if len(worst) > _NAMED else ""
    drawn.findings = [f"Worst class: {'; '.join(worst[:_NAMED]) or 'none was tested'}{more}."]
    drawn.description = drawn.findings
    if any(seeds > 1 for _, seeds in drawn.shown):
        drawn.caption += " Whiskers: one standard deviation over seeds to each side."
    values = "xaxis" if drawn.axis == "y" else "yaxis"
    drawn.layout[values] |= {"range": [-3, 103]}


def _orders(drawn: Figure, group: Group, rows: list[str], accuracies: FloatArray) -> dict[str, list[str]]:
    counts = group.first.counts
    by = f"accuracy of {group.label}" if len(drawn.groups) > 1 else "accuracy"
    ways = {
        f"{by}, lowest first": accuracies,
        "held by fewest clients first": np.count_nonzero(counts, axis=0),
        "fewest samples first": counts.sum(axis=0),
    }
    return charts.orders(rows, ways)


@figure(
    CLASSES,
    "What is taken for what",
    "Confusion matrix of the last evaluated model: one row a true class, its test samples shared out over the classes "
    "that the model names. The diagonal is right.",
    alike=same_classes,
    by_run=True,
)
def _confusion(drawn: Figure) -> None:
    names = drawn.members[0].first.class_names
    rows = charts.categories(names, "class")
    for group in drawn.members:
        last = [found for run in group.seeds if (found := run.last_evaluation) is not None]
        matrices = [np.array(one.confusion) for one in last if len(one.confusion) == len(names)]
        if not matrices:
            continue
        counts = np.sum(matrices, axis=0)
        shares = 100 * label_shares(counts)
        wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)  # as truth or as answer
        part = np.sort(np.argsort(-wrong, kind="stable")[:_CONFUSED])
        some = [rows[at] for at in part]
        hover = "of %{y}, %{z:.1f} % are taken for %{x}"
        trace = charts.heat_map(some, some, charts.numbers(shares[np.ix_(part, part)], 1), hover, percent=True)
        drawn.add(group, trace, seeds=len(matrices))
        if len(drawn.findings) < 4 and (mistakes := "; ".join(_mistakes(shares, names))):
            drawn.findings.append(f"Most often mistaken: {drawn.about(group)}{mistakes}.")
    if len(names) > _CONFUSED:
        drawn.caption += f" The {_CONFUSED} classes with the most mistakes of {len(names)}."
    if max((seeds for _, seeds in drawn.shown), default=0) > 1:
        drawn.caption += " All seeds' samples together."
    drawn.layout = {
        "xaxis": charts.CATEGORY | {"title": {"text": "taken for"}, "tickangle": -90},
        "yaxis": charts.DOWN | {"title": {"text": "true class"}},
    }
    drawn.height = 460


def _mistakes(shares: FloatArray, names: tuple[str, ...]) -> Iterator[str]:
    wrong = shares - np.diag(np.diag(shares))
    for at in np.argsort(-wrong, axis=None, kind="stable")[:3]:
        truth, answer = divmod(int(at), len(names))
        if (share := float(wrong[truth, answer])) >= 5:
            yield f"{names[truth]} for {names[answer]} ({charts.number(share)})"


@figure(
    CLASSES,
    "Each client's own classes, and those it never saw",
    "The last evaluated model, one marker a client: mean accuracy on the classes that the client holds, and on those "
    "that are vacant at it. Below the dashed diagonal, the model serves a client's own classes better.",
    one_seed=True,
)
def _by_client(drawn: Figure) -> None:
    for group in drawn.groups:
        final = _final_per_class(group.first)
        if final is None:
            continue
        tested = np.isfinite(final)
        held, vacant = ((group.first.counts > 0) & tested, (group.first.counts == 0) & tested)
        clients = np.flatnonzero(held.any(axis=1) & vacant.any(axis=1))
        if not len(clients):
            continue
        values = np.where(tested, final, 0)
        x, y = (of[clients] @ values / of[clients].sum(axis=1) for of in (held, vacant))
        holds = np.count_nonzero(group.first.counts, axis=1)
        notes = [f", {holds[at]} classes" for at in clients]
        add_cloud(drawn, group, clients, x, y, "%{customdata}<br>held %{x:.1f} %, vacant %{y:.1f} %", 2, notes)
    drawn.layout = charts.square(100, "classes it holds", "classes vacant at it", range=[-2, 102])
    drawn.height = 340
