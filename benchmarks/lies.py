"""How much a site gains by lying about its label counts or its loss, under each method: the table in docs/threats.md.

    python benchmarks/lies.py [--sites 10] [--classes 10] [--participation 0.5] [--rounds 50]

The smallest of the sites lies, the others tell the truth. A cell is the liar's share of all weight over the rounds,
those in which it is not selected included; where that changes, its share of the rounds follows in brackets. Each method
stands in two rows: without and with `training.weight_limit = 0.5`, which `fedskew deploy init` writes for three sites
or more. The label counts are those of a Dirichlet partition (beta 0.3) with 100 samples a site on average.
"""

from __future__ import annotations

import argparse

import numpy as np

from fedskew import methods
from fedskew.deploy import Lie, example_counts, lies

METHODS = ("fedavg", "uniform", "fedla", "fedpals", "afl", "fedentopt", "greedy_kl", "seol_kim")


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--participation", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    counts = example_counts(given.sites, given.classes)
    target = np.full(given.classes, 1 / given.classes)
    columns: list[str] = []
    rows: list[tuple[str, dict[str, Lie]]] = []
    for name in METHODS:
        for limit in (None, 0.5):
            method = methods.build(methods.expand({"preset": name}))
            found = lies(method, counts, target, given.participation, limit, given.rounds)
            rows.append((f"{name}{'' if limit is None else ', limit 0.5'}", {lie.what: lie for lie in found}))
            columns += [lie.what for lie in found if lie.what not in columns]
    print(f"| method | {' | '.join(what or 'the truth' for what in columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name, cells in rows:
        print(f"| {name} | {' | '.join(_cell(cells.get(what), cells['']) for what in columns)} |")


def _cell(lie: Lie | None, truth: Lie) -> str:
    if lie is None:
        return "-"
    often = "" if lie.rounds == truth.rounds and lie.what else f" ({lie.rounds:.2f})"
    return f"{lie.weight:.3f}{often}"


if __name__ == "__main__":
    main()
