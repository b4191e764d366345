"""How long FedEntOpt's table I takes on CIFAR-10: 4 partitions x 10 methods x 3 seeds x 500 rounds, projected.

    python benchmarks/table1.py [--device cuda] [--backend cohort] [--rounds 20] [--cells WORDS]
                                [--budget SECONDS]

Every cell of the block, as its recipe has it (fedentopt-table1), plays one round that is not counted and `--rounds`
timed ones, all seeds; its whole is 500 times the median round of all seeds (FedConcat: 480 of its encoders, 500 of its
head). A projection, and called one. Evaluation, start-up and report are left out, and so are real pictures: inputs are
random tensors of CIFAR-10's shape, labels are balanced. `--budget`: seconds after which no cell is begun.
Prints a JSON line a cell and a table of rounds per second, all seeds counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import cache
from typing import Any

import torch

import fedskew
from fedskew.data import Dataset
from fedskew.papers import Recipe, RecipeRow

NEVER = 10**9


@cache
def pictures(samples: int) -> Dataset:
    """Random tensors of CIFAR-10's shape, as normalised as its pictures are."""
    drawn = torch.Generator().manual_seed(0)
    return Dataset(
        name="random pictures",
        inputs=torch.randn(samples, 3, 32, 32, generator=drawn),
        targets=torch.arange(samples) % 10,
        test_inputs=torch.randn(10, 3, 32, 32, generator=drawn),
        test_targets=torch.arange(10),
        classes=tuple("0123456789"),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", default="cohort")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cells", default="CIFAR-10", help="labels of the table, such as 'cifar10,dir0.1,fedavg'")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=float("inf"))
    arguments = parser.parse_args()
    began, rows = time.perf_counter(), Recipe.read("fedentopt-table1").choose(arguments.cells)
    rows = tuple(row for row in rows if row.labels["dataset"] == "CIFAR-10")
    if arguments.device == "cuda" or (arguments.device == "auto" and torch.cuda.is_available()):
        torch.zeros(1, device="cuda")  # the driver's own start-up is nobody's
    done: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        labels = row.labels["partition"], row.labels["method"]
        if time.perf_counter() - began > arguments.budget:
            print(json.dumps({"partition": labels[0], "method": labels[1], "left_out": "no time left"}), flush=True)
            continue
        try:
            done[labels] = cell(row, arguments)
        except (RuntimeError, fedskew.errors.FedskewError) as error:
            said = " ".join(str(error).split())
            print(json.dumps({"partition": labels[0], "method": labels[1], "left_out": said}), flush=True)
            continue
        print(json.dumps({"partition": labels[0], "method": labels[1], **done[labels]}), flush=True)
    table(done, len(rows), arguments)


def cell(row: RecipeRow, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a round of all seeds, and the whole cell projected from them."""
    timed, stages = arguments.rounds, 1
    changes: dict[str, Any] = {
        "data": {"name": "table1:pictures", "samples": arguments.samples},
        "partition.clients": arguments.clients,
        "seeds": list(range(arguments.seeds)),
        "evaluation.every": NEVER,
        "engine.backend": arguments.backend,
        "engine.device": arguments.device,
    }
    if row.labels["method"] == "FedConcat":
        stages = 2
        changes["method.pipeline.encoder_rounds"] = 1 + timed
    whole = row.config()
    rounds = [whole.training.rounds]
    if stages == 2:
        first = row.tree["method"]["pipeline"]["encoder_rounds"]
        rounds = [first, whole.training.rounds - first]
    # The last round's record comes with the final evaluation, so one round more is played.
    changes["training.rounds"] = stages * (1 + timed) + 1
    spent: dict[int, float] = {}
    last = time.perf_counter()

    def after(record: dict[str, Any]) -> None:
        """Time since the record before it, to its round: seeds that ride together report at once."""
        nonlocal last
        now = time.perf_counter()
        spent[record["round"]] = spent.get(record["round"], 0.0) + now - last
        last = now

    result = fedskew.simulate(row.config(changes), progress=after)
    each = [
        statistics.median(spent[round] for round in range(stage * (1 + timed) + 2, (stage + 1) * (1 + timed) + 1))
        for stage in range(stages)
    ]
    return {
        "seconds_a_round": [round(value, 5) for value in each],
        "projected_seconds": round(sum(value * count for value, count in zip(each, rounds, strict=True)), 1),
        "rounds_per_second": round(arguments.seeds / each[0], 2),
        "backend": result.runs[0].summary["backend"],
    }


def table(done: dict[tuple[str, str], dict[str, Any]], asked: int, arguments: argparse.Namespace) -> None:
    partitions = list(dict.fromkeys(partition for partition, _ in done))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() and arguments.device != "cpu" else "CPU"
    print(f"\nRounds per second, {arguments.seeds} seeds counted, median of {arguments.rounds} rounds; {name}, PyTorch "
          f"{torch.__version__}, backend {arguments.backend}\n")  # fmt: skip
    print("| method | " + " | ".join(partitions) + " |")
    print("| --- |" + " ---: |" * len(partitions))
    for method in dict.fromkeys(method for _, method in done):
        cells = [done.get((partition, method)) for partition in partitions]
        print(
            f"| {method} | " + " | ".join("-" if one is None else f"{one['rounds_per_second']}" for one in cells) + " |"
        )
    total = sum(one["projected_seconds"] for one in done.values())
    print(f"\nProjected: {total / 60:.1f} minutes for {len(done)} of {asked} cells, {arguments.seeds} seeds each.")


if __name__ == "__main__":
    main()
