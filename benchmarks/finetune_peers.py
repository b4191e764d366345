"""The head of a frozen, pretrained body, federated by fedskew and by others: wall time of the same fine-tuning.

    python benchmarks/finetune_peers.py BODY.safetensors [--rounds 20] [--turns 3] [--only NAME ...] [--data .data]
    python benchmarks/finetune_peers.py BODY.safetensors --whole    # body and head, both of which train, at rate 0.01

Data, body and settings are those of `pretrained.py`: 50 classes of CIFAR-100 at 20 clients by Dir(0.1), a quarter of
them a round, one epoch in batches of 32, SGD 0.1 with momentum 0.9; one thread. All train on the same cohorts.

- `features kept`, `features anew`: fedskew with `engine.keep_features`, and without
- `plain`: a loop by hand, whose body is in eval mode under `no_grad`, for each batch
- `flower`, `pfl`: their simulations, with the plain loop's network, in environments as `simulators.py` makes them

Each turn is a whole training by new processes, one contestant after another. Printed: a JSON line for each training,
and a table of medians over turns: seconds from a process's start to the end of the last round, those of the rounds
after the first alone, and CPU seconds of these. Models are compared with the plain loop's (Flower and pfl shuffle
otherwise, or not at all).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pretrained import half
from safetensors.torch import load_file
from simulators import CACHE, HERE, SEED, Contestant, Player, Workload, agreement, cpu, python_of
from torch import nn

from fedskew.partition import DirichletByClass, Partition
from fedskew.randomness import Purpose, generator

ONE = ("--threads", "1")
CONTESTANTS = (
    Contestant("plain", "by_hand", ONE, "1 process x 1 thread"),
    Contestant("features kept", "by_fedskew", ("--own", *ONE), "1 process x 1 thread"),
    Contestant("features anew", "by_fedskew", ("--own", "--anew", *ONE), "1 process x 1 thread"),
    Contestant("flower", "by_flower", ("--processes", "1"), "1 actor x 1 thread", "flower"),
    Contestant("pfl", "by_pfl", ONE, "1 process x 1 thread", "pfl"),
)


def prepare(body: Path, model: str, rounds: int, root: str, folder: Path) -> None:
    """Write the task into a folder (see contestants/task.py)."""
    workload = Workload(model, 20, 5, 1, 32, 0.1 if model == "head" else 0.01, 0.9, 0.0, 0.1, rounds)
    data, draw = half(range(50, 100), root), np.random.default_rng(SEED + 1)
    targets, rng = data.targets.numpy(), generator(SEED, Purpose.PARTITION)
    rows = DirichletByClass(0.1).split(targets, workload.clients, rng, num_classes=50)
    cohorts = [draw.choice(workload.clients, workload.cohort, replace=False).tolist() for _ in range(rounds)]
    inputs = data.inputs.index_select(0, torch.arange(len(targets)))
    np.save(folder / "inputs.npy", inputs.numpy())
    np.save(folder / "targets.npy", targets)
    held: dict[str, Any] = {str(client): own for client, own in enumerate(rows)}
    np.savez(folder / "clients.npz", **held)
    Partition.of(rows, targets, 50).save(folder / "partition.npz")
    (folder / "settings.json").write_text(json.dumps({"seed": SEED, **dataclasses.asdict(workload)}))
    (folder / "cohorts.json").write_text(json.dumps(cohorts))
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        head = nn.Linear(256, 50)
    weights = load_file(body) | {f"head.{name}": value for name, value in head.state_dict().items()}
    np.savez(folder / "weights.npz", **{name: value.numpy() for name, value in weights.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("body", type=Path, help="body.safetensors of pretrained.py")
    parser.add_argument("--whole", action="store_true", help="train the body, too; without `features anew`")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[one.name for one in CONTESTANTS], metavar="NAME")
    parser.add_argument("--data", default=str(HERE.parent / ".data"))
    parser.add_argument("--installed", action="store_true", help="pfl and Flower are in this Python already")
    arguments = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    taken: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        folder = Path(place)
        prepare(arguments.body, "whole" if arguments.whole else "head", arguments.rounds, arguments.data, folder)
        for _ in range(arguments.turns):
            for one in (one for one in CONTESTANTS if one.name in arguments.only):
                if arguments.whole and one.name == "features anew":
                    continue
                try:
                    player = Player(one, python_of(one.environment, arguments.installed), folder)
                    before = player.cpu_seconds()
                    seconds = player.play(arguments.rounds - 1)
                    figures = player.start + seconds, seconds, player.cpu_seconds() - before
                    player.end()
                except (RuntimeError, OSError) as error:
                    print(json.dumps({"contestant": one.name, "left_out": " ".join(str(error).split())}), flush=True)
                    continue
                taken.setdefault(one.name, []).append(figures)
                rounded = [round(figure, 2) for figure in figures]
                print(json.dumps({"contestant": one.name, "seconds, after round 1, CPU": rounded}), flush=True)
        apart = agreement(folder, list(taken))
    print(
        f"\n{cpu()}, {os.cpu_count()} cores; PyTorch {torch.__version__}; {arguments.turns} turns of "
        f"{arguments.rounds} rounds\n\n| contestant | seconds | after round 1 | CPU after round 1 | from plain |"
    )
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, each in sorted(taken.items(), key=lambda item: statistics.median(one[0] for one in item[1])):
        whole, later, used = (statistics.median(part) for part in zip(*each, strict=True))
        print(f"| {name} | {whole:.1f} | {later:.1f} | {used:.1f} | {apart.get(name, float('nan')):.1e} |")


if __name__ == "__main__":
    main()
