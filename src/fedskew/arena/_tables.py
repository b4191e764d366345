"""The tables and the figure of an arena, written into its folder beside `runs.csv`."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from fedskew.arena._advice import SCALES, evidence_bytes
from fedskew.arena._arena import Arena, ArenaEntry
from fedskew.arena._compare import VIEWS, Scores, Standing, View
from fedskew.arena._plan import Line, further
from fedskew.arena._run import OF_FEDERATION, ArenaState
from fedskew.files import replacing, write_text, writing
from fedskew.tables import counted, csv_text, filled, grouped, markdown_table

_MOST_LABELS = 12
Place = tuple[str, ...]
"""The labels of a situation, and the method."""


def write_comparison(state: ArenaState, out: Path) -> list[Path]:
    """Write an arena's tables so far: `table.md`, `standings.csv`, `choices.csv`, `evidence.csv.gz` and the figure.

    They are written into the arena's folder in `out`, the folder of all runs, and returned; none if no compared run has
    ended. RunError where they can't be written.
    """
    arena, folder = state.arena, state.arena.folder(out)
    found = {view: _scores(state, view) for view in VIEWS}
    tables = {view: of.standings(arena.settings.reference) for view, of in found.items()}
    if not any(tables.values()):
        return []
    texts = {
        "table.md": _page(state, found["rounds"], tables),
        "standings.csv": csv_text(_standing_lines(tables)),
        "choices.csv": csv_text(choice_lines(state)),
    }
    evidence = folder / "evidence.csv.gz"
    for name, text in texts.items():
        write_text(folder / name, text)
    with writing(evidence), replacing(evidence) as part:
        part.write_bytes(evidence_bytes(evidence_rows(arena, state.federations, found["rounds"])))
    found["rounds"].draw(arena.settings.reference, folder / "differences.png")
    return [*(folder / name for name in texts), evidence, folder / "differences.png"]


def comparison(state: ArenaState) -> tuple[list[str], list[list[str]], list[str]]:
    """Return headings and cells of the comparison at equal rounds (none where nothing can be compared yet), and notes
    on how to read it, a line each."""
    return *_standing_table(_scores(state, "rounds").standings(state.arena.settings.reference)), _notes(state.arena)


def _scores(state: ArenaState, view: View) -> Scores:
    arena, settings = state.arena, state.arena.settings
    made_of = arena.trainings, settings.blocks
    return Scores.of(state.compared, arena.axes, settings.reference, view, settings.last, *made_of)


def _standing_table(rows: Sequence[Standing]) -> tuple[list[str], list[list[str]]]:
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
            "-" if math.isnan(row.low) else f"{row.low:+.1f} to {row.high:+.1f}",
            f"{row.median:+.1f}",
            _p(row.p),
            f"{row.ahead:.0%}",
            f"{row.harmed:.0%}",
            f"{row.collapsed} of {row.runs}",
        ]
        for row in rows
    ]


def _notes(arena: Arena) -> list[str]:
    return filled("fedskew.arena", "notes.txt", {}, settings=arena.settings).splitlines()


def _page(state: ArenaState, found: Scores, tables: dict[View, list[Standing]]) -> str:
    filters: dict[str, Callable[..., Any]] = {
        "counted": counted,
        "standings": lambda rows: markdown_table(*_standing_table(rows), labels=1),
        "ranks": lambda rows: markdown_table(["method", "average rank"], rows, labels=1),
        "p": _p,
    }
    ranked = found.ranks()
    ranks = [[method, f"{rank:.2f}"] for method, rank in zip(ranked.methods, ranked.ranks, strict=True)]
    values = {"notes": _notes(state.arena), "tables": tables, "ranked": ranked, "ranks": ranks}
    by_axis = list(_by_axis(state.arena, found))
    return filled("fedskew.arena", "table.md", filters, state=state, arena=state.arena, by_axis=by_axis, **values)


def _by_axis(arena: Arena, found: Scores) -> Iterator[tuple[str, str]]:
    """Yield each axis of few labels, and how methods stand at each of them."""
    for axis in arena.axes:
        if parts := found.by_label(arena.settings.reference, axis, _MOST_LABELS):
            methods = [method for method in found.values if method != arena.settings.reference]
            cells = [[method, *(_cell(own.get(method)) for own in parts.values())] for method in methods]
            yield axis, markdown_table(["method", *parts], cells, labels=1)


def _cell(part: Standing | None) -> str:
    if part is None:
        return "-"
    collapsed = f"; {part.collapsed}" if part.collapsed else ""
    return f"{part.difference:+.1f}, {part.median:+.1f} ({part.trainings}{collapsed})"


def _p(p: float, equals: str = "") -> str:
    if math.isnan(p):
        return "-"
    return "< 0.001" if p < 0.0005 else f"{equals}{p:.3f}"


def _standing_lines(tables: dict[View, list[Standing]]) -> Iterable[list[Any]]:
    yield ["view", *(field.name for field in fields(Standing))]
    for view, rows in tables.items():
        for row in rows:
            yield [view, *(_rounded(value) if isinstance(value, float) else value for value in vars(row).values())]


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.5g}")


def choice_lines(state: ArenaState) -> Iterable[list[Any]]:
    """Yield the values chosen for each method in each situation, their mean validation score, and whether the grid of
    rates, or of the numbers of the method's own parameter, its default among them, cuts off further ones there."""
    yield [*state.arena.axes, "method", "lr", "own", "validation", "rate_at_end", "own_at_end"]
    tuned, chosen = defaultdict[Place, dict[tuple[str, str], list[str]]](dict), dict[Place, tuple[str, str]]()
    for line in state.runs:
        place, values = tuple(line[axis] for axis in [*state.arena.axes, "method"]), (line["lr"], line["own"])
        if line["stage"] == "tune":
            tuned.setdefault(place, {}).setdefault(values, []).append(line["validation"])
        elif not line["failure"]:
            chosen[place] = values
    for entry in state.arena.entries:
        place = *entry.situation.values(), entry.method
        if place in chosen:
            tried, (rate, own) = tuned.get(place, {}), chosen[place]
            key = entry.own[0][0] if entry.own else ""
            yield [
                *place,
                rate,
                own,
                f"{fmean(map(float, scores)):.5f}" if all(scores := tried.get(chosen[place], [""])) else "",
                _at_end(entry, "training.lr", [rate, *(one for one, _ in tried)]),
                _at_end(entry, key, [one or str(entry.default) for one in (own, *(other for _, other in tried))]),
            ]


def _at_end(entry: ArenaEntry, key: str, texts: Sequence[str]) -> bool | None:
    """Return whether the first number, as of `local_step.mu = 0.5`, is cut off; None where there is no other."""
    known = [number for text in texts if (number := _number(text)) is not None]
    if _number(texts[0]) is None or len({*known}) < 2:
        return None
    return further(entry, key, known[0], known) is not None


def _number(text: str) -> float | None:
    try:
        return float(text.rpartition("=")[2])
    except ValueError:
        return None


def evidence_rows(
    arena: Arena, federations: Mapping[tuple[str, ...], Line], found: Scores
) -> list[tuple[str, dict[str, str], dict[str, float]]]:
    """Return for each situation the network, its federations' text and mean figures, and what methods gained there.

    `federations` are by situation and partition, as `ArenaState` has them. Baselines that are no method are left out.
    """
    methods = dict.fromkeys(entry.method for entry in arena.entries if not entry.config.partition.baseline)
    gains = {method: found.gains(method) for method in methods if method != arena.settings.reference}
    of_situation = grouped(federations, lambda key: key[:-1])
    rows = []
    for situation, entry in {tuple(entry.situation.values()): entry for entry in arena.entries}.items():
        own = {method: gain[situation] for method, gain in gains.items() if situation in gain}
        if own and (lines := [federations[key] for key in of_situation.get(situation, ())]):
            means = {name: f"{fmean(float(line[f'{OF_FEDERATION}{name}']) for line in lines):.6g}" for name in SCALES}
            means["federation"] = lines[0][f"{OF_FEDERATION}federation"]
            rows.append((entry.config.model.name, means, own))
    return rows
