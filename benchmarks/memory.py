"""Memory and time of a round of wide models: how both grow with the cohort.

    python benchmarks/memory.py [--method fedavg scaffold] [--cohorts 2 10 30] [--backend sequential]

Each row is a process of its own that plays three rounds of ResNet-18 (11.2 million parameters) with one step of 4
pictures a client, and a checkpoint after each round. "copies" is the growth of its largest resident memory, after the
run was set up, in vectors of the model's size; of the processes backend it is the parent's.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import fedskew
from fedskew.data import Dataset


def pictures(clients: int) -> Dataset:
    """Noise of 10 classes, 4 pictures for each client."""
    rng = np.random.default_rng(0)
    targets = torch.arange(4 * clients) % 10
    inputs = torch.from_numpy(rng.normal(size=(4 * clients, 3, 32, 32)).astype(np.float32))
    return Dataset("noise", inputs, targets, inputs[:8], targets[:8], tuple("abcdefghij"))


def play(method: str, cohort: int, backend: str) -> dict[str, float]:
    """Play three rounds of one method, and return what they took."""
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ends = list[float]()
    with tempfile.TemporaryDirectory() as place:
        result = fedskew.simulate(
            {
                "data": {"name": "memory:pictures", "clients": cohort},
                "partition": {"rule": "iid", "clients": cohort},
                "model": "resnet18",
                "method": method,
                "training": {"rounds": 3, "batch_size": 4, "epochs": 1, "lr": 0.01},
                "evaluation": {"every": 3},
                "engine": {"backend": backend} | ({"processes": 2} if backend == "processes" else {}),
            },
            out=place,
            progress=lambda record: ends.append(time.process_time()),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = 4 * sum(parameter.numel() for parameter in result.model.parameters())
    rounds = np.diff(ends)
    return {
        "peak MB": round(peak / 1e6),
        "copies": round((peak - base) / size, 1),
        "round s": round(float(rounds.min()), 2),
    }


def main() -> None:
    """Print a row for each method and cohort."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", default=["fedavg", "scaffold"])
    parser.add_argument("--cohorts", nargs="+", type=int, default=[2, 10, 30])
    parser.add_argument("--backend", default="sequential")
    parser.add_argument("--one", action="store_true", help="play in this process")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(play(chosen.method[0], chosen.cohorts[0], chosen.backend)))
        return
    for method in chosen.method:
        for cohort in chosen.cohorts:
            words = ["--one", "--method", method, "--cohorts", str(cohort), "--backend", chosen.backend]
            said = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True).stdout
            print(method, cohort, said.splitlines()[-1])


if __name__ == "__main__":
    main()
