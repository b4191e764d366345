"""Write the table of docs/compare.md that says of each method where it helps, where it hurts, and what it costs.

    python tools/compared_methods.py          # the page's table, from docs/measured/*-runs.csv

A cell is the mean difference from FedAvg in points, over trainings, with its interval of 95 % (`fedskew.arena.Scores`);
bold: the interval leaves out 0. No interval where there are fewer than three trainings or blocks; [1]: of one training.
`tools/publish_arena.py` does it, too.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedskew import methods
from fedskew.arena import Scores
from fedskew.components import has

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- by tools/compared_methods.py -->\n", "<!-- end -->\n"
Line = Mapping[str, str]
COLUMNS: dict[str, tuple[str, str | None, Callable[[Line], bool]]] = {
    "last layer, frozen body": ("heads", "task", lambda line: True),
    "small networks: digits, MNIST, Fashion-MNIST": ("arena", "task", lambda line: line["task"] != "CIFAR-10"),
    "LeNet-5, 3,000 of CIFAR-10, 40 rounds": ("arena", None, lambda line: line["task"] == "CIFAR-10"),
    "LeNet-5, 6,000 of CIFAR-10, 150 rounds": ("networks", None, lambda line: True),
}
"""By heading: the arena, the axis whose labels are blocks, and which of its runs."""
PRESETS = {"fedentopt, target": "fedentopt_target", "fedlc, no mask": "fedlc"}
BOUNDS = {"pooled": "all samples in one place", "alone": "no federation: each client's own model"}


def differences(arena: str, blocks: str | None, fits: Callable[[Line], bool]) -> tuple[dict[str, str], int]:
    """Return each method's cell, and of how many trainings they are means."""
    with (DOCS / "measured" / f"{arena}-runs.csv").open(newline="", encoding="utf-8") as file:
        every = list(csv.DictReader(file))
    axes = list(every[0])[: list(every[0]).index("method")]
    lines = [line for line in every if line["stage"] == "run" and not line["failure"] and fits(line)]
    fixed = [axis for axis in axes if axis != "target"]
    trainings = {tuple(line[axis] for axis in axes): tuple(line[axis] for axis in fixed) for line in lines}
    rows = Scores.of(lines, axes, "fedavg", last=3, trainings=trainings, blocks=blocks).standings("fedavg")
    most = max(row.trainings for row in rows)
    return {row.method: _cell(row, most) for row in rows}, most


def _cell(row: Any, most: int) -> str:
    whole = f"{row.difference:+.1f}" + ("" if math.isnan(row.low) else f" ({row.low:+.1f} to {row.high:+.1f})")
    whole = f"**{whole}**" if row.low > 0 or row.high < 0 else whole
    return whole if row.trainings == most else f"{whole} [{row.trainings}]"


def cost(label: str) -> str:
    """Return what a method costs beyond FedAvg, and what it must be told."""
    if label in BOUNDS:
        return BOUNDS[label]
    name = PRESETS.get(label, label).removesuffix(", untrained")
    method = methods.build(methods.expand({"preset": name}))
    told = [str(methods.cost(method)) or "nothing"]
    told += ["the target mix"] if any(has(one, "needs_target") for _, one in method.components()) else []
    return ", ".join(told + (["no round"] if method.finish is not None and label != "ccvr" else []))


def table() -> str:
    """Return the table in Markdown: methods of the frozen body or of two columns, the best there first."""
    found = {heading: differences(*column) for heading, column in COLUMNS.items()}
    names = [name for cells, _ in found.values() for name in cells if name != "fedavg"]
    order = [name for name in dict.fromkeys(names) if names.count(name) > 1 or name in next(iter(found.values()))[0]]
    lines = [
        ["method", *(f"{heading} ({number} trainings)" for heading, (_, number) in found.items()), "beyond FedAvg"]
    ]
    lines += [["---", *["---:"] * len(found), "---"]]
    lines += [[name, *(cells.get(name, "") for cells, _ in found.values()), cost(name)] for name in order]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Put the table into the page."""
    page = DOCS / "compare.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
