"""Clients that never took part: what they get alone, from the common model, and from personal ones.

    python benchmarks/new_clients.py RESULTS.jsonl [--data .data] [--seeds 0 1 2 3 4]
    python benchmarks/new_clients.py RESULTS.jsonl --table

As benchmarks/sites.py, but of the twenty clients fifteen train, seven of them in each of 40 rounds. The other five hold
no sample out, so that calibration knows nothing of them; they have all their training samples, or thirty. Alone they
train as many rounds as the others took part in, in the mean.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sites import run

import fedskew
from fedskew.partition import Partition

MODELS = {"fashion_mnist": "mlp3", "cifar10": "lenet5"}
PERSONAL: dict[str, dict[str, Any]] = {
    "prior": {"name": "prior"},
    "finetune": {"name": "finetune"},
    "finetune, head": {"name": "finetune", "layers": "head"},
}
OLD, ALL = 15, 20
Key = tuple[str, float, int, int, str]


def federation(name: str, data: str, seed: int) -> dict[str, Any]:
    return {
        "data": {"name": name, "root": data, "client_test": 0.3, "held_out": 0.1},
        "model": MODELS[name],
        "training": {"rounds": 40, "participation": 7 / ALL, "epochs": 2, "batch_size": 32, "lr": 0.05},
        "evaluation": {"every": 40},
        "engine": {"backend": "sequential"},
        "seeds": [seed],
    }


def partition(name: str, beta: float, samples: int, data: str, seed: int, folder: str) -> Path:
    """Save a partition in which the last five clients hold nothing out, and train on so many samples at most."""
    tree = federation(name, data, seed)
    tree["data"]["rows"] = 12_000
    rule = {"rule": "dirichlet_by_class", "beta": beta, "clients": ALL}
    made = fedskew.simulate(tree, partition=rule, method="fedavg", training={"rounds": 0}, out=folder)
    assert made.folder is not None
    whole = Partition.load(made.folder / "partition.npz")
    rng = np.random.default_rng(seed)
    indices = [*whole.indices[:OLD], *(np.sort(rng.permutation(rows)[:samples]) for rows in whole.indices[OLD:])]
    held_out = (*whole.held_out[:OLD], *(rows[:0] for rows in whole.held_out[OLD:]))
    labels = fedskew.data.load(name, root=data).targets.numpy()
    path = Path(folder) / "partition.npz"
    replace(Partition.of(indices, labels, whole.num_classes), held_out=held_out, test=whole.test).save(path)
    return path


def train(key: Key, data: str) -> dict[str, list[float]]:
    """Train one setting, and return the new clients' accuracies by row."""
    name, beta, samples, seed, personal = key
    rng = np.random.default_rng(seed)
    cohorts = [rng.choice(OLD, size=7, replace=False).tolist() for _ in range(40)]
    tree = federation(name, data, seed)
    tree["evaluation"]["baselines"] = ["alone"] if personal == "prior" else []
    tree["method"] = {
        "preset": "fedavg",
        "selection": {"name": "recorded", "cohorts": cohorts},
        "personal": PERSONAL[personal],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = partition(name, beta, samples, data, seed, folder)
        result = fedskew.simulate(tree, partition={"rule": "file", "path": str(path)})
    rows: dict[str, list[float]] = {}
    for one in result.sites():
        if one["client"] >= OLD:
            rows.setdefault(one["row"], []).append(round(one["accuracy"], 4))
    return rows


def print_table(path: Path) -> None:
    found: dict[tuple[str, float, int], dict[str, list[float]]] = {}
    seeds: dict[tuple[str, float, int], set[int]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        name, beta, samples, seed, personal = line["key"]
        setting = (name, beta, samples)
        seeds.setdefault(setting, set()).add(seed)
        for row, values in line["rows"].items():
            if personal == "prior" or row == "personal":
                column = personal if row == "personal" else row
                found.setdefault(setting, {}).setdefault(column, []).append(100 * float(np.mean(values)))
    columns = ["common", "alone", *PERSONAL]
    print("| new clients of | own samples | seeds |", " | ".join(columns), "|")
    print("| --- | --- | ---: |", " | ".join(["---:"] * len(columns)), "|")
    for (name, beta, samples), values in sorted(found.items()):
        cells = [f"{np.mean(values[one]):.1f} ± {np.std(values[one]):.1f}" if one in values else "" for one in columns]
        size = "all" if samples > 1000 else str(samples)
        print(f"| {name}, Dir({beta:g}) | {size} | {len(seeds[name, beta, samples])} |", " | ".join(cells), "|")


def keys(seeds: list[int]) -> Iterator[Key]:
    for seed, name, beta, samples, personal in itertools.product(seeds, MODELS, (0.1, 0.5), (30, 1_000_000), PERSONAL):
        yield name, beta, samples, seed, personal


if __name__ == "__main__":
    run(__doc__, keys, train, print_table)
