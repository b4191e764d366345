"""Write the tables of docs/compare.md that say of each method where it helps, where it hurts, and what it costs.

    python tools/compared_methods.py          # the page's tables and their picture, from docs/measured/*-runs.csv

A cell is the mean difference from FedAvg in points over trainings (`fedskew.arena.Scores`), and in how many of them the
method is ahead, where there are several; bold: in all, or in none. One table is of trainings scored on the test data's
own label mix, which are the picture's, one of those scored on 9 : 1. `tools/publish_arena.py` writes them, too.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import fmean
from textwrap import fill

import numpy as np

from fedskew import methods
from fedskew.arena import Scores
from fedskew.components import has
from fedskew.report import drawing

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end -->\n"
COLUMNS = {
    "last layer: images, texts, tables": ["heads"],
    "two layers: words of AG News, tables, MNIST, Fashion-MNIST": ["words"],
    "few sites, all in every round: images, tables": ["silos"],
    "LeNet-5, 6,000 of CIFAR-10, 210 rounds": ["networks"],
    "LeNet-5, all of CIFAR-10, 80 rounds": ["cifar10"],
    "the same, 200 rounds": ["cifar10-long"],
    "LeNet-5, CIFAR-100's 20 superclasses, 200 rounds": ["cifar100"],
    "the same, its 100 classes": ["cifar100-classes"],
}
"""By heading the arenas; each is compared with FedAvg of its own arena."""
LAST = {"cifar10-long": 10, "cifar100": 5, "cifar100-classes": 5}
"""Number of evaluations whose mean is a score, where it is not 3."""
MOST = 8.0
"""Points of accuracy at which the picture's colours end."""
PRESETS = {"fedentopt, target": "fedentopt_target"}  # of the others it stands before the comma
BOUNDS = {"pooled": "all samples in one place", "alone": "no federation: each client's own model"}


@cache
def published(arena: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the axes of an arena, and the lines of its published runs, refusals left out."""
    with (DOCS / "measured" / f"{arena}-runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    axes = list(lines[0])[: list(lines[0]).index("method")]
    return axes, [line for line in lines if not line["failure"]]


@cache
def compared(heading: str, target: str) -> dict[str, tuple[float, int, int]]:
    """Return each method's mean difference, in how many trainings of a column it is ahead, and of how many."""
    arenas = COLUMNS[heading]
    lines = [line | {"arena": arena} for arena in arenas for line in published(arena)[1]]
    lines = [line for line in lines if line["stage"] == "run" and line.get("target", "none") == target]
    axes = ["arena", *published(arenas[0])[0]]
    rows = Scores.of(lines, axes, "fedavg", last=LAST.get(arenas[0], 3)).standings("fedavg")
    return {row.method: (row.difference, round(row.ahead * row.trainings), row.trainings) for row in rows}


def _agree(ahead: int, of: int) -> bool:
    return of > 1 and ahead in (0, of)


def _cell(mean: float, ahead: int, of: int) -> str:
    whole = f"{mean:+.1f} ({ahead} of {of})" if of > 1 else f"{mean:+.1f}"
    return f"**{whole}**" if _agree(ahead, of) else whole


def cost(label: str) -> str:
    """Return what a method costs beyond FedAvg, and what it must be told."""
    if label in BOUNDS:
        return BOUNDS[label]
    name = PRESETS.get(label, label.split(",")[0])
    method = methods.build(methods.expand({"preset": name}))
    told = [str(methods.cost(method)) or "nothing"]
    told += ["the target mix"] if any(has(one, "needs_target") for _, one in method.components()) else []
    return ", ".join(told + (["no round"] if method.finish is not None and label != "ccvr" else []))


def table(target: str) -> str:
    """Return a table in Markdown: the methods of the first column, the best there first, then those of the next."""
    found = {heading: compared(heading, target) for heading in COLUMNS}
    lines = [["method", *found, "beyond FedAvg"], ["---", *["---:"] * len(found), "---"]]
    for name in _order(target):
        cells = (_cell(*column[name]) if name in column else "" for column in found.values())
        lines.append([name, *cells, cost(name)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _order(target: str) -> list[str]:
    return [*dict.fromkeys(name for heading in COLUMNS for name in compared(heading, target))]


def draw(path: Path) -> None:
    """Draw the differences on the test data's own mix as a matrix, methods with the highest mean on top."""
    columns = [compared(heading, "none") for heading in COLUMNS]
    own = {name: [column[name][0] if name in column else np.nan for column in columns] for name in _order("none")}
    names = sorted(own, key=lambda name: -fmean(np.clip([one for one in own[name] if one == one], -MOST, MOST)))
    with drawing.figure(path, width=10.5, height=1.8 + 0.27 * len(names)) as figure:
        plot = figure.subplots()
        shown = plot.imshow([own[name] for name in names], cmap="RdBu", vmin=-MOST, vmax=MOST, aspect="auto")
        for row, name in enumerate(names):
            for at, column in enumerate(columns):
                if name in column:
                    mean, ahead, of = column[name]
                    weight, ink = "bold" if _agree(ahead, of) else "normal", "white" if abs(mean) > 5 else "black"
                    plot.text(at, row, f"{mean:+z.1f}", ha="center", va="center", weight=weight, color=ink)
        plot.set_yticks(range(len(names)), names)
        plot.set_xticks(range(len(columns)), [fill(heading, 14) for heading in COLUMNS], fontsize=8)
        plot.xaxis.tick_top()
        plot.spines[:].set_visible(False)
        plot.tick_params(length=0)
        label = "points ahead of FedAvg\n(bold: in all trainings, or in none)"
        figure.colorbar(shown, extend="both", shrink=0.4, label=label)


def with_tables(text: str) -> str:
    """Return the page with the tables that the published runs make."""
    for target in ("none", "9:1"):
        begin = f"<!-- target {target}, by tools/compared_methods.py -->\n"
        (before, rest), made = text.split(begin), table(target)
        _, after = rest.split(END, 1)
        text = before + begin + made + END + after
    return text


def main() -> None:
    """Put the tables into the page, and draw the picture."""
    page = DOCS / "compare.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw(DOCS / "measured" / "compared-methods.png")


if __name__ == "__main__":
    main()
