"""Whose held-out samples a target's mix should be estimated from: all clients', some drawn, or the round's cohort's.

    python benchmarks/asked_clients.py [--seeds 3]

MNIST, 100 clients with about 100 samples by Dir(0.1) or with two labels each, of which a fifth is held out; FedAvg, 10
clients a round, 784-100-100-10, 2 epochs, batch 32, learning rate 0.05; a target of 1,000 samples with a mix from
Dir(0.5). After rounds 10, 15, ..., 30 the mix is estimated from the held-out samples of all 100 clients, of 30 drawn at
random, and of the cohort. Printed, as one JSON line for each: the mean L1 distance from the target's mix, and in how
many estimates some class had no held-out sample. MNIST is read from $FEDSKEW_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import numpy as np
import torch

from fedskew.engine.target import Estimation, logits_of
from fedskew.experiment import make_task, make_training_loop, resolve
from fedskew.labels import estimate_mix, outcome_table

CLIENTS, CLASSES, DRAWN = 100, 10, 30
RULES: dict[str, dict[str, Any]] = {
    "Dir(0.1)": {"rule": "dirichlet_by_class", "beta": 0.1, "min_size": 1},
    "two labels": {"rule": "quantity", "labels_per_client": 2},
}


def estimates(rule: str, seed: int) -> list[tuple[str, float, int]]:
    """Who was asked, the L1 distance, and how many classes were not seen, for every estimate of one federation."""
    truth = np.random.default_rng(seed).dirichlet(np.full(CLASSES, 0.5))
    config = resolve(
        {
            "data": {"name": "mnist", "rows": 14_300, "validation": 0.3, "held_out": 0.2},
            "partition": RULES[rule] | {"clients": CLIENTS},
            "model": {"name": "mlp3", "width": 100},
            "method": "fedavg",
            "training": {"rounds": 30, "participation": 0.1, "epochs": 2, "batch_size": 32, "lr": 0.05},
            "target": {"mix": "estimate", "truth": truth.tolist(), "unlabelled": 1000},
            "evaluation": {"every": 30},
        }
    )
    task = make_task(config, seed)
    loop, rules = make_training_loop(config, seed, task=task), Estimation(CLASSES)
    assert task.unlabelled is not None
    unlabelled, found = task.unlabelled, []

    def estimate(record: Any) -> None:
        if not rules.is_due(record["round"]):
            return
        model = loop.runner.evaluated_model(loop.server)
        assert model is not None
        loop.model.write_state(model)
        said = rules.outcomes(logits_of(loop.model.network, unlabelled))
        cells = np.bincount(said, minlength=CLASSES * rules.bins)
        some = np.random.default_rng([seed, record["round"]]).permutation(CLIENTS)[:DRAWN]
        for who, asked in (("all", range(CLIENTS)), (f"{DRAWN} drawn", some), ("cohort", record["cohort"])):
            rows = np.concatenate([task.held_out[client] for client in asked])
            ours = rules.outcomes(logits_of(loop.model.network, task.dataset.inputs, rows))
            table = outcome_table(task.dataset.targets.numpy()[rows], ours, CLASSES, rules.bins)
            made = estimate_mix(table, cells)
            found.append((who, float(np.abs(made.mix - truth).sum()), len(made.unseen)))

    loop.run(progress=estimate)
    return found


def main() -> None:
    """Run all, and print the table."""
    parser = argparse.ArgumentParser(description="Whose held-out samples a mix should be estimated from.")
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    for rule in RULES:
        found = sorted(itertools.chain.from_iterable(estimates(rule, seed) for seed in range(seeds)))
        for who, of_one in itertools.groupby(found, key=lambda entry: entry[0]):
            _, distances, unseen = zip(*of_one, strict=True)
            said = {"partition": rule, "asked": who, "estimates": len(distances)}
            print(
                json.dumps(said | {"L1": round(float(np.mean(distances)), 3), "unseen": int(np.count_nonzero(unseen))})
            )


if __name__ == "__main__":
    main()
