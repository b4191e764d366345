"""Write the tables of docs/compare.md that say of each method where it helps, where it hurts, and what it costs.

    python tools/compared_methods.py          # the page's table, from docs/measured/*-runs.csv

A cell is the mean difference from FedAvg in points over trainings (`fedskew.arena.Scores`), and in how many of them the
method is ahead; bold: in all, or in none. One table is of trainings scored on the test data's own label mix, one of
those scored on 9 : 1. `tools/publish_arena.py` writes them, too.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from fedskew import methods
from fedskew.arena import Scores
from fedskew.components import has

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end -->\n"
Line = Mapping[str, str]
COLUMNS: dict[str, tuple[list[str], Callable[[Line], bool]]] = {
    "last layer: images, texts, tables": (["heads", "heads-second-body"], lambda line: True),
    "small networks: digits, MNIST, Fashion-MNIST": (["arena"], lambda line: line["task"] != "CIFAR-10"),
    "two layers: words of AG News, tables": (["words"], lambda line: True),
    "LeNet-5, 3,000 of CIFAR-10, 40 rounds": (["arena"], lambda line: line["task"] == "CIFAR-10"),
    "LeNet-5, 6,000 of CIFAR-10, 150 rounds": (["networks"], lambda line: True),
}
"""By heading: the arenas, and which of their runs; each is compared with FedAvg of its own arena."""
PRESETS = {"fedentopt, target": "fedentopt_target", "fedlc, no mask": "fedlc"}
BOUNDS = {"pooled": "all samples in one place", "alone": "no federation: each client's own model"}


@cache
def published(arena: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the axes of an arena, and the lines of its published runs, refusals left out."""
    with (DOCS / "measured" / f"{arena}-runs.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    axes = list(lines[0])[: list(lines[0]).index("method")]
    return axes, [line for line in lines if not line["failure"]]


def differences(arenas: Sequence[str], fits: Callable[[Line], bool], target: str) -> dict[str, str]:
    """Return each method's cell."""
    lines = [line | {"arena": arena} for arena in arenas for line in published(arena)[1] if fits(line)]
    lines = [line for line in lines if line["stage"] == "run" and line.get("target", "none") == target]
    axes = ["arena", *published(arenas[0])[0]]
    rows = Scores.of(lines, axes, "fedavg", last=3).standings("fedavg")
    return {row.method: _cell(row.difference, round(row.ahead * row.trainings), row.trainings) for row in rows}


def _cell(mean: float, ahead: int, of: int) -> str:
    whole = f"{mean:+.1f} ({ahead} of {of})"
    return f"**{whole}**" if ahead in (0, of) else whole


def cost(label: str) -> str:
    """Return what a method costs beyond FedAvg, and what it must be told."""
    if label in BOUNDS:
        return BOUNDS[label]
    name = PRESETS.get(label, label).removesuffix(", untrained")
    method = methods.build(methods.expand({"preset": name}))
    told = [str(methods.cost(method)) or "nothing"]
    told += ["the target mix"] if any(has(one, "needs_target") for _, one in method.components()) else []
    return ", ".join(told + (["no round"] if method.finish is not None and label != "ccvr" else []))


def table(target: str) -> str:
    """Return a table in Markdown: methods of the frozen body or of two columns, the best there first."""
    found = {heading: differences(*column, target) for heading, column in COLUMNS.items()}
    names = [name for cells in found.values() for name in cells if name != "fedavg"]
    order = [name for name in dict.fromkeys(names) if names.count(name) > 1 or name in next(iter(found.values()))]
    lines = [["method", *found, "beyond FedAvg"], ["---", *["---:"] * len(found), "---"]]
    lines += [[name, *(cells.get(name, "") for cells in found.values()), cost(name)] for name in order]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(text: str) -> str:
    """Return the page with the tables that the published runs make."""
    for target in ("none", "9:1"):
        begin = f"<!-- target {target}, by tools/compared_methods.py -->\n"
        (before, rest), made = text.split(begin), table(target)
        _, after = rest.split(END, 1)
        text = before + begin + made + END + after
    return text


def main() -> None:
    """Put the tables into the page."""
    page = DOCS / "compare.md"
    page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
