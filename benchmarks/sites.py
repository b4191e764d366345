"""What each client gets: alone, the common model, personal ones, all data in one place; the tables of docs/sites.md.

    python benchmarks/sites.py RESULTS.jsonl [--data .data] [--seeds 0 1 2 3 4]
    python benchmarks/sites.py RESULTS.jsonl --table

Twenty clients share 12,000 samples of a data set and test on 30 % of their own; two local epochs of batches of 32, lr
0.05; 40 rounds; one thread. Each line of RESULTS is one training: setting, personal component, seed, and every client's
accuracy by row. What is there already is not trained again, so that it can be stopped at any time.
`--table` prints Markdown: over seeds and clients the mean accuracy and, after the slash, the mean of the worst tenth of
the clients; then personal models against alone, paired over clients, with an interval by bootstrap over (seed, client).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedskew

MODELS = {"mnist": "mlp3", "fashion_mnist": "mlp3", "cifar10": "lenet5"}
PARTITIONS: dict[str, dict[str, Any]] = {
    "Dir(0.1)": {"rule": "dirichlet_by_class", "beta": 0.1},
    "Dir(0.5)": {"rule": "dirichlet_by_class", "beta": 0.5},
    "2 labels": {"rule": "quantity", "labels_per_client": 2},
}
PERSONAL: dict[str, dict[str, Any]] = {
    "prior": {"name": "prior"},
    "partial": {"name": "partial"},
    "partial, head first": {"name": "partial", "head_epochs": 1},
    "ditto": {"name": "ditto"},
    "rod": {"name": "rod"},
    "finetune": {"name": "finetune"},
    "finetune, head": {"name": "finetune", "layers": "head"},
}
Key = tuple[str, str, float, str, int]


def train(key: Key, data: str) -> dict[str, list[float]]:
    """Train one setting and return the clients' accuracies by row; the prior's has all four."""
    name, partition, participation, personal, seed = key
    result = fedskew.simulate(
        data={"name": name, "root": data, "rows": 12_000, "client_test": 0.3, "held_out": 0.1},
        partition={**PARTITIONS[partition], "clients": 20},
        model=MODELS[name],
        method={"preset": "fedavg", "personal": PERSONAL[personal]},
        training={"rounds": 40, "participation": participation, "epochs": 2, "batch_size": 32, "lr": 0.05},
        evaluation={"every": 40, "baselines": ["alone", "pooled"] if personal == "prior" else []},
        engine={"backend": "sequential"},
        seeds=[seed],
    )
    rows: dict[str, list[float]] = {}
    for one in result.sites():
        rows.setdefault(one["row"], []).append(round(one["accuracy"], 4))
    return rows


def worst_tenth(values: np.ndarray) -> float:
    return float(np.sort(values)[: -(-len(values) // 10)].mean())


def interval(differences: np.ndarray) -> tuple[float, float]:
    """A 95 % interval of the mean, by 10,000 resamples."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(len(differences), size=(10_000, len(differences)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def print_tables(path: Path) -> None:
    found: dict[tuple[str, str, float], dict[int, dict[str, np.ndarray]]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        name, partition, participation, personal, seed = line["key"]
        of_seed = found.setdefault((name, partition, participation), {}).setdefault(seed, {})
        for row, values in line["rows"].items():
            if personal == "prior" or row == "personal":
                of_seed[personal if row == "personal" else row] = np.array(values)
    columns = ["common", "alone", "pooled", *PERSONAL]
    print("| setting | seeds |", " | ".join(columns), "|\n| --- | ---: |", " | ".join(["---:"] * len(columns)), "|")
    for (name, partition, participation), seeds in sorted(found.items()):
        cells = []
        for column in columns:
            runs = [rows[column] for rows in seeds.values() if column in rows]
            means = [100 * float(values.mean()) for values in runs]
            worst = [100 * worst_tenth(values) for values in runs]
            cells.append(f"{np.mean(means):.1f}/{np.mean(worst):.0f}" if runs else "")
        print(f"| {name}, {partition}, {participation:g} | {len(seeds)} |", " | ".join(cells), "|")
    print("\n| setting | against alone:", " | ".join(columns[:1] + columns[2:]), "| clients that lose by prior |")
    print("| --- |", " | ".join(["---:"] * len(columns)), "|")
    for (name, partition, participation), seeds in sorted(found.items()):
        cells, lose = [], ""
        for column in (column for column in columns if column != "alone"):
            pairs = [100 * (rows[column] - rows["alone"]) for rows in seeds.values() if {column, "alone"} <= set(rows)]
            if not pairs:
                cells.append("")
                continue
            together = np.concatenate(pairs)
            low, high = interval(together)
            cells.append(f"{together.mean():+.1f} ({low:+.1f} to {high:+.1f})")
            if column == "prior":
                lose = f"{(together < 0).sum()} of {len(together)}"
        print(f"| {name}, {partition}, {participation:g} |", " | ".join(cells), f"| {lose} |")


def run(
    about: str | None,
    keys: Callable[[list[int]], Iterable[tuple[Any, ...]]],
    train: Callable[[Any, str], dict[str, list[float]]],
    print_tables: Callable[[Path], None],
) -> None:
    """Read the command line; train what RESULTS lacks of the keys of some seeds, or print its tables."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", default=".data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print_tables(arguments.results)
        return
    torch.set_num_threads(1)
    arguments.results.touch()
    done = {tuple(json.loads(line)["key"]) for line in arguments.results.read_text(encoding="utf-8").splitlines()}
    for key in keys(arguments.seeds):
        if key not in done:
            line = json.dumps({"key": key, "rows": train(key, arguments.data)})
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(*key, flush=True)


def keys(seeds: list[int]) -> Iterator[Key]:
    for participation, seed, partition, name, personal in itertools.product(
        (0.1, 0.5), seeds, PARTITIONS, MODELS, PERSONAL
    ):
        yield name, partition, participation, personal, seed


if __name__ == "__main__":
    run(__doc__, keys, train, print_tables)
