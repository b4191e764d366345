"""How even cohorts are that Fed-CBS, FedEntOpt and chance choose, and what a choice costs.

    python benchmarks/cohorts.py [--clients 10 100 1000 100000] [--rounds 20]

Clients hold mixes from Dir(0.1) over ten classes, of 20 to 500 samples; a cohort is 10 clients, or a third of fewer
than 30. Prints a table in Markdown, means over rounds after the first: entropy of the cohort's pooled labels in bits
(log2 10 = 3.322 at most), squared distance of their mix from uniform (Fed-CBS's measure, QCID), milliseconds of
processor time for a cohort, and the share of all clients that were chosen at least once.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from fedskew.labels import LabelCounts, entropy
from fedskew.selection import INDEX, FedEntOpt, Selection, Uniform

FedCBS = INDEX["fedcbs"]

SELECTIONS: dict[str, Selection] = {
    "uniform": Uniform(),
    "fedentopt": FedEntOpt(),
    "fedcbs": FedCBS(),
    "fedcbs, exponent 5": FedCBS(exponent=5.0),
}


def pool(clients: int) -> LabelCounts:
    """Label counts, `(clients, 10)`."""
    rng = np.random.default_rng(0)
    mixes, sizes = rng.dirichlet(np.full(10, 0.1), clients), rng.integers(20, 501, clients)
    return LabelCounts(rng.multinomial(sizes, mixes / mixes.sum(axis=1, keepdims=True)).astype(np.float64))


def main() -> None:
    """Choose cohorts, and print the table."""
    parser = argparse.ArgumentParser(description="Evenness and cost of cohorts.")
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100, 1000, 100_000])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    print("| clients | cohort | selection | entropy | QCID | ms | clients chosen |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for clients in given.clients:
        counts, size = pool(clients), min(10, clients // 3)
        for name, selection in SELECTIONS.items():
            state, seen, rows = selection.init(counts), set[int](), []
            for round in range(given.rounds + 1):
                began = time.process_time()
                cohort, state = selection.select(state, counts, size, np.random.default_rng(round))
                spent = 1000 * (time.process_time() - began)
                pooled = counts.counts[cohort].sum(axis=0)
                seen |= set(cohort.tolist())
                rows.append((float(entropy(pooled)), ((pooled / pooled.sum() - 0.1) ** 2).sum(), spent))
            bits, apart, spent = np.mean(rows[1:], axis=0)
            share = f"{100 * len(seen) / clients:.3g} %"
            print(f"| {clients:,} | {size} | {name} | {bits:.3f} | {apart:.4f} | {spent:.2f} | {share} |")


if __name__ == "__main__":
    main()
