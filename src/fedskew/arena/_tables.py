"""The tables and figures of an arena, written into its folder beside `runs.csv`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedskew.arena._advice import evidence_bytes
from fedskew.arena._arena import Arena
from fedskew.arena._compare import VIEWS, Part, Ranks, Scores, Standing, View, by_axis, ranks, scores, standings
from fedskew.arena._files import OF_FEDERATION
from fedskew.arena._run import ArenaState
from fedskew.files import replacing, write_text, writing
from fedskew.tables import counted, csv_text, markdown_table

_VIEW_WORDS: dict[View, str] = {
    "rounds": "At equal rounds",
    "compute": "At equal compute: the local steps of the reference's last round, a further pass counting for a third",
    "traffic": "At equal traffic: the bytes, up and down, of the reference's last round, a finish's among them",
}
EVIDENCE = "evidence.csv.gz"  # the table for `fedskew advise`

_MOST_LABELS = 12
_PARTS = "mean difference, median of runs (trainings; collapsed runs)"


def write_comparison(state: ArenaState, out: Path) -> list[Path]:
    """Write an arena's tables so far: `table.md`, `standings.csv`, `choices.csv`, `evidence.csv.gz` and the figures.

    Args:
        state: The arena's state.
        out: The folder of all runs, such as `runs`.

    Returns:
        The files; none if no compared run has ended.

    Raises:
        RunError: They can't be written.
    """
    arena, folder = state.arena, state.arena.folder(out)
    found = {
        view: scores(state.compared, arena.axes, arena.reference, view, arena.last, arena.trainings) for view in VIEWS
    }
    tables = {view: standings(of, arena.reference) for view, of in found.items()}
    ranked = ranks(found["rounds"])
    if not any(tables.values()):
        return []
    files = {
        "table.md": _page(state, found, tables, ranked),
        "standings.csv": csv_text(_standing_lines(tables)),
        "choices.csv": csv_text(_choice_lines(state)),
    }
    evidence = _evidence(state, found["rounds"])
    with writing(folder):
        for name, text in files.items():
            write_text(folder / name, text)
        with replacing(folder / EVIDENCE) as part:
            part.write_bytes(evidence)
    _draw(arena, tables["rounds"], ranked, folder)
    drawn = [folder / "differences.png", *([folder / "ranks.png"] if ranked.methods else [])]
    return [*(folder / name for name in files), folder / EVIDENCE, *drawn]


def standing_table(rows: Sequence[Standing]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table of a comparison.

    Args:
        rows: The methods' standings.
    """
    headings = [
        *("method", "trainings", "federations", "score", "difference", "95 %", "median", "p", "ahead", "harmed"),
        "collapsed",
    ]
    return headings, [
        [
            row.method,
            str(row.trainings),
            str(row.federations),
            f"{row.score:.1f}",
            f"{row.difference:+.1f}",
            "-" if row.interval is None else f"{row.interval[0]:+.1f} to {row.interval[1]:+.1f}",
            f"{row.median:+.1f}",
            _p(row.p),
            f"{row.ahead:.0%}",
            f"{row.harmed:.0%}",
            f"{row.collapsed} of {row.runs}",
        ]
        for row in rows
    ]


def comparison_notes(arena: Arena) -> list[str]:
    """Return notes on how to read the table, a line each.

    Args:
        arena: The arena.
    """
    tuned = (
        f"Every method spent {arena.budget} runs in every situation on its tuning, on a seed and a partition of their "
        "own, by validation samples (choices.csv)."
        if arena.rates
        else "Nothing is tuned: every method has its paper's parameters and the situation's learning rate."
    )
    return [
        tuned,
        "Training: situations that differ only in the label mix that models are scored on count as one; its score is "
        "the mean of theirs.",
        f"Difference: points ahead of {arena.reference}, paired on the same partition and seed, mean over trainings; "
        f"score: mean of the last {arena.last} evaluations, on the target mix where there is one, in %. A finished "
        f"model has one evaluation, and is compared with {arena.reference}'s of the same round.",
        "95 %: bootstrap over trainings; median: over runs. p: Wilcoxon's signed ranks over trainings, "
        "Holm-corrected for the methods. Ahead, harmed: share of the trainings in which it is ahead, or more than a "
        "point behind. Collapsed: runs more than 20 points behind.",
    ]


def _evidence(state: ArenaState, found: Scores) -> bytes:
    """Return what every method gained over the reference in every federation, mean over seeds."""
    gains: dict[tuple[str, ...], dict[str, float]] = {}
    for method, own in found.values.items():
        for (situation, partition), seeds in own.items():
            known = [one.difference for one in seeds.values() if one.difference is not None]
            if known and method != state.arena.reference:
                gains.setdefault((*situation, partition), {})[method] = fmean(known)
    federations = {
        key: {name.removeprefix(OF_FEDERATION): value for name, value in line.items()}
        for key, line in state.federations.items()
    }
    return evidence_bytes(federations, gains)


def _page(state: ArenaState, found: dict[View, Scores], tables: dict[View, list[Standing]], ranked: Ranks) -> str:
    arena = state.arena
    refused = sum(bool(line["failure"]) for line in state.runs)
    lines = [
        f"# {arena.name}",
        "",
        f"    {arena.command}",
        "",
        f"{state.finished:,} of {counted(state.number, 'run')} done"
        f"{f', {refused:,} of them refused: a config that makes no sense (`failure` in runs.csv)' if refused else ''}"
        f"{'' if state.finished == state.number else ': what follows is a part of the plan'}; seeds "
        f"{', '.join(map(str, arena.entries[0].config.seeds))}, partitions {', '.join(map(str, arena.partitions))}. "
        f"Made by fedskew {', '.join(sorted({line['made'] for line in state.compared}))}.",
        "",
        *(f"- {note}" for note in comparison_notes(arena)),
    ]
    for view in VIEWS:
        if tables[view]:
            lines += ["", f"## {_VIEW_WORDS[view]}", "", markdown_table(*standing_table(tables[view]), labels=1)]
    if ranked.methods:
        lines += ["", "## Average ranks", "", *_rank_lines(ranked)]
    for axis in arena.axes:
        table = by_axis(found["rounds"], arena.reference, axis)
        labels = list(dict.fromkeys(label for own in table.values() for label in own))
        if 1 < len(labels) <= _MOST_LABELS:
            cells = [[method, *(_cell(own.get(label)) for label in labels)] for method, own in table.items()]
            lines += ["", f"## By {axis}: {_PARTS}", "", markdown_table(["method", *labels], cells, labels=1)]
    if state.failures:
        lines += ["", "## Not trained this time", "", *(f"- {line}" for line in state.failures)]
    return "\n".join([*lines, ""])


def _rank_lines(ranked: Ranks) -> Iterable[str]:
    yield markdown_table(
        ["method", "average rank"],
        [[method, f"{rank:.2f}"] for method, rank in zip(ranked.methods, ranked.ranks, strict=True)],
        labels=1,
    )
    said = f"Over {counted(ranked.trainings, 'training')} that all of these methods have."
    if not math.isnan(ranked.critical):
        said += (
            f" Average ranks that are less than {ranked.critical:.2f} apart do not differ at 5 % (Nemenyi, all pairs)."
        )
    if not math.isnan(ranked.p):
        said += f" Friedman's test that all are alike: p {_p(ranked.p, equals='= ')}."
    if ranked.left_out:
        said += f" Left out, as they lack situations: {', '.join(ranked.left_out)}."
    yield ""
    yield said


def _p(p: float, equals: str = "") -> str:
    if math.isnan(p):
        return "-"
    return "< 0.001" if p < 0.0005 else f"{equals}{p:.3f}"


def _cell(part: Part | None) -> str:
    if part is None:
        return "-"
    collapsed = f"; {part.collapsed}" if part.collapsed else ""
    return f"{part.difference:+.1f}, {part.median:+.1f} ({part.trainings}{collapsed})"


def _standing_lines(tables: dict[View, list[Standing]]) -> Iterable[list[Any]]:
    yield [
        *("view", "method", "trainings", "federations", "score", "difference", "low", "high", "median", "p"),
        *("ahead", "harmed", "collapsed", "runs"),
    ]
    for view, rows in tables.items():
        for row in rows:
            low, high = row.interval or (None, None)
            ends = [None if end is None else round(end, 4) for end in (low, high)]
            p = None if math.isnan(row.p) else float(f"{row.p:.4g}")
            numbers = [round(row.score, 4), round(row.difference, 4), *ends, round(row.median, 4), p]
            counts = [row.ahead, row.harmed, row.collapsed, row.runs]
            yield [view, row.method, row.trainings, row.federations, *numbers, *counts]


def _choice_lines(state: ArenaState) -> Iterable[list[Any]]:
    """Yield the values chosen for each method in each situation, and their validation score."""
    axes = state.arena.axes
    yield [*axes, "method", "lr", "own", "validation"]
    tuned = {
        (*(line[axis] for axis in axes), line["method"], line["lr"], line["own"]): line["validation"]
        for line in state.runs
        if line["stage"] == "tune"
    }
    chosen = dict.fromkeys(
        (*(line[axis] for axis in axes), line["method"], line["lr"], line["own"]) for line in state.compared
    )
    for key in chosen:
        yield [*key, tuned.get(key)]


def _draw(arena: Arena, rows: Sequence[Standing], ranked: Ranks, folder: Path) -> None:
    from matplotlib.figure import Figure

    from fedskew.report import drawing

    with drawing.styled():
        if rows:
            figure = Figure(figsize=(7, 1.2 + 0.32 * len(rows)), layout="constrained")
            drawing.differences(
                figure.subplots(),
                [row.method for row in rows],
                [row.difference for row in rows],
                [row.interval for row in rows],
                arena.reference,
            )
            drawing.save(figure, folder / "differences.png")
        if ranked.methods:
            figure = Figure(figsize=(7, 1.8 + 0.32 * len(ranked.methods)), layout="constrained")
            drawing.critical_differences(
                figure.subplots(), ranked.methods, ranked.ranks, ranked.critical, ranked.groups()
            )
            drawing.save(figure, folder / "ranks.png")
