"""Figures of the classes: how well each is known, by whom it is held, what it is taken for."""

import numpy as np

from fedskew.report import _charts as charts
from fedskew.report._runs import Group, SeedRun, label_shares, same_classes
from fedskew.report.drawing import FloatArray
from fedskew.tables import counted

_CELLS = 300_000  # of all heat maps of classes by rounds together; a page stays small and quick with so many
_MOST_ROUNDS = 120
_CONFUSED = 60  # classes of a confusion matrix: more can't be told apart
_NAMED = 8  # runs in one sentence


def _final_per_class(run: SeedRun) -> FloatArray | None:
    last = run.last_evaluation
    return None if last is None else 100 * np.array(last.per_class, dtype=np.float64)  # None becomes NaN


@charts.figure(
    charts.CLASSES,
    "Every class, round by round",
    "One row a class, one column a round: how many of the class's test samples the model gets right. A row that goes "
    "dark after some rounds is a class that was forgotten when nobody who trained held it.",
    alike=same_classes,
    by_run=True,
    wide=True,
)
def _class_by_round(drawn: charts.Figure) -> None:
    rows = charts.class_names(drawn.members[0])
    columns = int(np.clip(_CELLS // (len(drawn.groups) * len(rows)), 8, _MOST_ROUNDS))
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
            _order(drawn, "y", group, rows, accuracies[-1])
        hover = "%{y}, round %{x}: %{z:.1f} %"
        drawn.add(group, charts.heat_map(x, rows, charts.numbers(accuracies.T, 1), hover, is_share=True), seeds=seeds)
    if drawn.several:
        drawn.caption += " Mean over seeds."
    drawn.layout = {"xaxis": {"title": {"text": "round"}}, "yaxis": charts.DOWN}
    drawn.height = 480 if len(rows) > charts.MANY else 120 + 24 * len(rows)


@charts.figure(
    charts.CLASSES,
    "Accuracy by class",
    "The last evaluated model, one row a class (one column where there are many).",
    alike=same_classes,
)
def _final(drawn: charts.Figure) -> None:
    names = drawn.members[0].first.class_names
    rows = drawn.by_class("accuracy", range=[-3, 103])
    worst = []
    for group in drawn.members:
        finals = [final for run in group.seeds if (final := _final_per_class(run)) is not None]
        if not finals:
            continue
        mean = np.mean(finals, axis=0)  # a class without a test sample has none in every seed
        if not drawn.shown:
            _order(drawn, drawn.axis, group, rows, mean)
        counts = group.first.counts
        held = zip(np.count_nonzero(counts, axis=0), counts.sum(axis=0), strict=True)
        notes = [f"held by {who:,} of {len(counts):,} ({samples:,})" for who, samples in held]
        std = np.std(finals, axis=0, ddof=1) if len(finals) > 1 else None
        drawn.add_classes(group, mean, len(finals), std, notes)
        if np.isfinite(mean).any():
            lowest = np.flatnonzero(mean == np.nanmin(mean))
            others = f" and {len(lowest) - 1} more" if len(lowest) > 1 else ""
            worst.append(f"{drawn.about(group)}{names[lowest[0]]}{others} ({charts.number(mean[lowest[0]])})")
    more = f"; and of {len(worst) - _NAMED} more runs" if len(worst) > _NAMED else ""
    drawn.findings = [f"Worst class: {'; '.join(worst[:_NAMED]) or 'none was tested'}{more}."]
    drawn.description = drawn.findings
    if drawn.several:
        drawn.caption += " Whiskers: one standard deviation over seeds to each side."


def _order(drawn: charts.Figure, axis: str, group: Group, rows: list[str], accuracies: FloatArray) -> None:
    counts = group.first.counts
    by = f"accuracy of {group.label}" if len(drawn.groups) > 1 else "accuracy"
    ways = {
        f"{by}, lowest first": accuracies,
        "held by fewest clients first": np.count_nonzero(counts, axis=0),
        "fewest samples first": counts.sum(axis=0),
    }
    drawn.order_by(axis, rows, ways)


@charts.figure(
    charts.CLASSES,
    "What is taken for what",
    "Confusion matrix of the last evaluated model: one row a true class, its test samples shared out over the classes "
    "that the model names. The diagonal is right.",
    alike=same_classes,
    by_run=True,
)
def _confusion(drawn: charts.Figure) -> None:
    names, rows = drawn.members[0].first.class_names, charts.class_names(drawn.members[0])
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
        cells = charts.numbers(shares[np.ix_(part, part)], 1)
        drawn.add(group, charts.heat_map(some, some, cells, hover, is_share=True), seeds=len(matrices))
        np.fill_diagonal(shares, 0)
        pairs = [divmod(int(at), len(names)) for at in np.argsort(-shares, axis=None, kind="stable")[:3]]
        mistakes = [
            f"{names[truth]} for {names[answer]} ({charts.number(shares[truth, answer])})"
            for truth, answer in pairs
            if shares[truth, answer] >= 5
        ]
        if mistakes and len(drawn.findings) < 4:
            drawn.findings.append(f"Most often mistaken: {drawn.about(group)}{'; '.join(mistakes)}.")
    if len(names) > _CONFUSED:
        drawn.caption += f" The {_CONFUSED} classes with the most mistakes of {len(names)}."
    if drawn.several:
        drawn.caption += " All seeds' samples together."
    drawn.layout = {
        "xaxis": charts.CATEGORY | {"title": {"text": "taken for"}, "tickangle": -90},
        "yaxis": charts.DOWN | {"title": {"text": "true class"}},
    }
    drawn.height = 460


@charts.figure(
    charts.CLASSES,
    "Each client's own classes, and those it never saw",
    "The last evaluated model, one marker a client: mean accuracy on the classes that the client holds, and on those "
    "that are vacant at it. Below the dashed diagonal, the model serves a client's own classes better.",
    one_seed=True,
)
def _by_client(drawn: charts.Figure) -> None:
    for group in drawn.groups:
        final = _final_per_class(group.first)
        if final is None:
            continue
        tested = np.isfinite(final)
        held, vacant = ((group.first.counts > 0) & tested, (group.first.counts == 0) & tested)
        clients = np.flatnonzero(held.any(axis=1) & vacant.any(axis=1))
        if not len(clients):
            continue
        x, y = (of[clients] @ np.where(tested, final, 0) / of[clients].sum(axis=1) for of in (held, vacant))
        holds = np.count_nonzero(group.first.counts[clients], axis=1)
        notes = [f", {counted(number, 'class', 'classes')}" for number in holds.tolist()]
        drawn.add_cloud(group, clients, x, y, "%{customdata}<br>held %{x:.1f} %, vacant %{y:.1f} %", 2, notes)
    drawn.square(100, "classes it holds", "classes vacant at it", range=[-2, 102])
