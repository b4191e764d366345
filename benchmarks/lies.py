"""How much a site gains by lying about its label counts or its loss, under each method: the table in docs/threats.md.

    python benchmarks/lies.py [--sites 10] [--classes 10] [--participation 0.5] [--rounds 50]

The smallest of the sites lies, the others tell the truth. A cell is the liar's share of all weight over the rounds,
those in which it is not selected included; where that changes, its share of the rounds follows in brackets. Each method
stands in two rows: without and with `training.weight_limit = 0.5`, which `fedskew deploy init` writes for three sites
or more. The label counts are those of a Dirichlet partition (beta 0.3) with 100 samples a site on average.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew import methods
from fedskew.deploy._rehearsal import example_counts
from fedskew.engine import Assignment, Backend, Federation, Sent, Update
from fedskew.errors import ArgumentError
from fedskew.methods import Method
from fedskew.models import ModelState
from fedskew.weighting import AFL

METHODS = ("fedavg", "uniform", "fedla", "fedpals", "afl", "fedentopt", "greedy_kl", "seol_kim")
MOST_SAMPLES = 10**9
"""More samples a server refuses."""

FloatArray = NDArray[np.float64]
LOSS = "afl.loss"


class Lie(NamedTuple):
    """The gain of a site by a lie.

    Attributes:
        what: The lie; empty: the truth.
        weight: The site's share of all weight, averaged over rounds, those in which it is not selected included.
        rounds: Share of the rounds in which it is selected.
    """

    what: str
    weight: float
    rounds: float


FALSE_COUNTS: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "1,000 times its samples": lambda own, mix: own * 1000,
    "30 samples of each class": lambda own, mix: np.full(len(own), 30.0),
    "10**9 samples, as many of each class": lambda own, mix: np.full(len(own), float(MOST_SAMPLES // len(own))),
    "10**9 samples in the target's mix": lambda own, mix: np.floor(MOST_SAMPLES * mix),
}
"""By lie: from a site's true label counts and the target mix to the counts that it reports."""


def lies(
    method: Method,
    counts: FloatArray,
    target: FloatArray | None = None,
    participation: float = 1.0,
    weight_limit: float | None = None,
    rounds: int = 20,
    seed: int = 0,
) -> tuple[Lie, ...]:
    """Play rounds in which the smallest site lies.

    Args:
        method: The method; only its selection and its weighting matter.
        counts: True label counts, shape `(sites, classes)`.
        target: Target label mix, shape `(classes,)`.
        participation: Share of the sites that is selected in each round.
        weight_limit: See `mixing.limited`.
        rounds: Number of rounds.
        seed: Seed of the selection.

    Returns:
        The site's weight when it tells the truth (first), and with each lie.
    """
    liar = int(counts.sum(axis=1).argmin())
    mix = counts.sum(axis=0) / counts.sum() if target is None else target
    claims = {"": counts}
    for what, lie in FALSE_COUNTS.items():
        claims[what] = counts.copy()
        claims[what][liar] = lie(counts[liar], mix)
    plain = methods.build(methods.expand({"preset": "fedavg"}))
    chosen = dataclasses.replace(plain, selection=method.selection, weighting=method.weighting)
    losses = dict.fromkeys(claims, 1.0)
    if isinstance(method.weighting, AFL):
        claims["a loss 10 times the others'"], losses["a loss 10 times the others'"] = counts, 10.0
    found = []
    for what, table in claims.items():
        backend = _Untrained(liar, losses[what])
        try:
            federation = Federation(chosen, backend, table, target, participation, seed, weight_limit=weight_limit)
        except ArgumentError:
            continue  # the selection refuses such counts
        state = federation.start(backend.model)
        weight, selected = 0.0, 0
        for _ in range(rounds):
            state, record = federation.run_round(state)
            selected += liar in record.cohort
            weight += sum(w for site, w in zip(record.answered, record.weights, strict=True) if site == liar)
        found.append(Lie(what, weight / rounds, selected / rounds))
    return tuple(found)


class _Untrained(Backend):
    """A backend that trains nothing; one client reports a loss of its own."""

    model = ModelState(torch.ones(1), torch.zeros(0), torch.zeros(0, dtype=torch.int64))

    def __init__(self, liar: int, loss: float) -> None:
        self._liar, self._loss = liar, loss

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        """See `Backend.train`."""
        none = torch.zeros(1)
        return [
            Update(
                client=task.client,
                change=none,
                norm=torch.zeros(()),
                buffers=sent.model.buffers,
                integers=sent.model.integers,
                steps=1,
                loss=1.0,
                reply={LOSS: torch.tensor(self._loss if task.client == self._liar else 1.0)},
            )
            for task in cohort
        ]


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
