"""How often intervals of a target's label mix hold the truth where the target has few samples.

    python benchmarks/few_samples.py [--draws 400] [--method gls]

A model of known quality, two classes: its score is normal with variance 1 for each of them (AUROC .75, .85 or .95), and
its probabilities are calibrated. 100 to 2000 samples are held out, half of them or 6 % of the second class; the target
has 8 to 300 samples, 6, 20 or 50 % of them of that class. Ten classes: ten such scores, of which the true class's is
higher by 1.5, 2.5 or 4, and target mixes from Dir(0.5). Printed, for each model and number of held-out samples: how
often 95 % intervals hold the true share (of two classes: at the prevalence where that is least), and their mean width.
Every cell has its own seed; ten classes take a third of the draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.special import ndtri, softmax

from fedskew.labels import MixEstimate, MixMethod, calibrate, estimate_mix, outcome_cells, outcome_table

BINS = 4
SAMPLES = (8, 20, 50, 100, 300)
PREVALENCES = (0.06, 0.2, 0.5)


def probabilities(rng: np.random.Generator, labels: np.ndarray, classes: int, apart: float) -> np.ndarray:
    """Calibrated probabilities, for a uniform mix, of a model whose scores of true and other classes are some apart."""
    scores = rng.normal(size=(len(labels), classes))
    scores[np.arange(len(labels)), labels] += apart
    return np.asarray(softmax(apart * scores, axis=1))


def estimate(held: np.ndarray, held_labels: np.ndarray, new: np.ndarray, method: MixMethod) -> MixEstimate:
    classes = held.shape[1]
    tables = outcome_table(held_labels, outcome_cells(held), classes, BINS)
    if method == "em":
        return estimate_mix(tables, calibrate(np.log(held), held_labels).apply(np.log(new)), "em")
    cells = outcome_cells(new)
    return estimate_mix(tables, np.bincount(cells, minlength=classes * BINS), method)


def drawn(
    seed: int, classes: int, apart: float, held_out: int, share: float | None, samples: int, mix: np.ndarray | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Held-out probabilities and labels, the target's probabilities and its mix, again and again."""
    rng = np.random.default_rng([seed, held_out, samples])
    ours = np.full(classes, 1 / classes) if share is None else np.array([1 - share, share])
    while True:
        labels = rng.choice(classes, held_out, p=ours)
        if len(np.unique(labels)) < min(classes, 2):
            continue
        theirs = rng.dirichlet(np.full(classes, 0.5)) if mix is None else mix
        new = rng.choice(classes, samples, p=theirs)
        yield probabilities(rng, labels, classes, apart), labels, probabilities(rng, new, classes, apart), theirs


def figures(draws: int, method: MixMethod, *setting: Any) -> tuple[float, float]:
    """Coverage and mean width of 95 % intervals."""
    inside, widths = [], []
    for _, (held, labels, new, mix) in zip(range(draws), drawn(*setting), strict=False):
        low, high = estimate(held, labels, new, method).interval().T
        inside.append((low <= mix) & (mix <= high))
        widths.append(high - low)
    return float(np.mean(inside)), float(np.mean(widths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--method", default="gls")
    given = parser.parse_args()
    for auroc in (0.75, 0.85, 0.95):
        for held_out, share in ((100, 0.5), (100, 0.06), (500, 0.5), (2000, 0.5)):
            found = []
            for samples in SAMPLES:
                each = [
                    figures(given.draws, given.method, 0, 2, ndtri(auroc), held_out, share, samples,
                            np.array([1 - prevalence, prevalence]))
                    for prevalence in PREVALENCES
                ]  # fmt: skip
                found.append(f"{min(one[0] for one in each):.3f} ({np.mean([one[1] for one in each]):.2f})")
            print(f"| AUROC {auroc:.2f} | {held_out}, {share:.0%} | {' | '.join(found)} |", flush=True)
    for apart in (1.5, 2.5, 4.0):
        for held_out in (100, 500, 2000):
            found = [
                "{:.3f} ({:.2f})".format(
                    *figures(given.draws // 3, given.method, 1, 10, apart, held_out, None, samples, None)
                )
                for samples in SAMPLES
            ]
            print(f"| ten classes, {apart} | {held_out} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
