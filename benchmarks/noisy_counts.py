"""What is left of label-aware weights when every client's counts are released with noise, on the recipes' own
partitions.

    python benchmarks/noisy_counts.py [--draws 50]

For each partition and epsilon (Laplace noise of scale 1 / epsilon on every count, drawn once, as
conditions.count_epsilon and `deploy` with noisy counts do), means over the draws: how far FedLA's and FedPALS's weights
are from those of exact counts (L1 distance, 0 to 2), and the squared distance of the label mix that FedPALS's weights
give from the target mix. FedPALS has an effective sample size of half of all samples (ess = 0.5), and one draw in five
is of another split and, where the recipe has no target, another target mix from Dir(0.5). Sizes are the noisy counts'
sums. Only labels are read, of MNIST and Fashion-MNIST in $FEDSKEW_DATA.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from fedskew.experiment import make_task, resolve
from fedskew.labels import privatize
from fedskew.weighting import fedavg, fedla, fedpals, fedpals_strength

EPSILONS = (1.0, 0.5, 0.2, 0.1)
TARGET = [0.02] * 5 + [0.18] * 5
RECIPES = {
    "compare: digits, 20 clients, Dir(0.1)": (
        {"data": "digits", "partition": {"rule": "dirichlet_by_class", "clients": 20, "beta": 0.1, "min_size": 1}},
        TARGET,
    ),
    "fedpals-fashion-mnist-c2: 9 clients of 2 labels, and the target": (
        {"data": "fashion_mnist", "partition": {"rule": "sparsity", "clients": 10, "labels_per_client": 2}},
        None,
    ),
    "fedvls-mnist-dir0.1: 10 clients": (
        {"data": "mnist", "partition": {"rule": "dirichlet_by_class", "clients": 10, "beta": 0.1, "min_size": 10}},
        "drawn",
    ),
    "fedla-two-groups: Fashion-MNIST, 10 clients": (
        {
            "data": "fashion_mnist",
            "partition": {
                "rule": "iid_and_exclusive",
                "clients": 10,
                "exclusive_share": 0.3,
                "labels_per_client": 1,
                "samples_per_client": 2400,
            },
        },
        "drawn",
    ),
}


def weights(seen: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FedLA's and FedPALS's."""
    return fedla(seen), fedpals(seen, target, fedpals_strength(seen, target, 0.5))


def measured(tree: dict[str, Any], wanted: list[float] | str | None, draws: int) -> dict[float, np.ndarray]:
    """For each epsilon, and infinity for exact counts: L1 of FedLA, L1 of FedPALS, its distance, FedAvg's distance."""
    config = resolve({**tree, "schema": 1, "model": "logistic", "training": {"rounds": 1}})
    found: dict[float, list[list[float]]] = {epsilon: [] for epsilon in (np.inf, *EPSILONS)}
    for seed in range(max(1, draws // 5)):
        task, rng = make_task(config, seed), np.random.default_rng(seed)
        counts = task.counts
        target = np.array(wanted) if isinstance(wanted, list) else task.target
        if wanted == "drawn":
            target = rng.dirichlet(np.full(10, 0.5))
        assert target is not None
        mixes = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        exact = weights(counts, target)
        plain = float(np.sum((fedavg(counts) @ mixes - target) ** 2))
        for epsilon in found:
            for _ in range(1 if epsilon == np.inf else 5):
                la, pals = exact if epsilon == np.inf else weights(privatize(counts, epsilon, rng), target)
                distance = float(np.sum((pals @ mixes - target) ** 2))
                found[epsilon].append([np.abs(la - exact[0]).sum(), np.abs(pals - exact[1]).sum(), distance, plain])
    return {epsilon: np.mean(rows, axis=0) for epsilon, rows in found.items()}


def main() -> None:
    said = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said.add_argument("--draws", type=int, default=50)
    draws = said.parse_args().draws
    print("| partition | counts | FedLA: L1 | FedPALS: L1 | FedPALS: distance | FedAvg: distance |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name, (tree, wanted) in RECIPES.items():
        for epsilon, (la, pals, distance, plain) in measured(tree, wanted, draws).items():
            seen = "exact" if epsilon == np.inf else f"ε = {epsilon:g}"
            print(f"| {name} | {seen} | {la:.4f} | {pals:.4f} | {distance:.5f} | {plain:.4f} |", flush=True)


if __name__ == "__main__":
    main()
