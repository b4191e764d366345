"""One client after another against all in lock-step: what the backend "auto" chooses between, on a CPU.

    python benchmarks/lockstep.py

Processor time of a client's step (SGD with momentum and weight decay, two epochs, random samples; one thread, the least
of three rounds).
"""

from __future__ import annotations

import copy
import time

import numpy as np
import torch

from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.engine.cohort import CohortBackend
from fedskew.local_steps import SGD
from fedskew.models import FlatModel, build
from fedskew.objectives import INDEX, Objective

CASES = [
    ("logistic", (1, 8, 8), 10, 80),
    ("mlp3", (1, 8, 8), 16, 80),
    ("mlp3", (1, 28, 28), 64, 128),
    ("lenet5", (3, 32, 32), 10, 40),
]
EPOCHS = 2


def main() -> None:
    torch.set_num_threads(1)
    print("| network | parameters | batch | clients | one after another, ms | in lock-step, ms | auto |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name, shape, batch, samples in CASES:
        for clients in (8, 32, 100):
            model, took, chosen = measured(name, shape, batch, samples, clients)
            cells = [name, f"{len(model.vector):,}", batch, clients, *(f"{1000 * one:.3f}" for one in took), chosen]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def measured(
    name: str, shape: tuple[int, ...], batch: int, samples: int, clients: int
) -> tuple[FlatModel, list[float], str]:
    """The network, the seconds of a client's step in both ways, and what auto chooses."""
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples * clients, *shape, generator=drawn)
    targets = torch.randint(10, (samples * clients,), generator=drawn)
    rows = np.split(np.arange(samples * clients), clients)
    data = PartitionedData(inputs, targets, rows, np.full((clients, 10), samples / 10))
    training = LocalTraining(batch, 0.01, momentum=0.9, weight_decay=5e-4)
    work = LocalWork(data, Objective(INDEX["cross_entropy"]()), SGD(), training, seed=0)
    module = build(name, 10, shape, generator=drawn)
    tasks = [Assignment(client, EPOCHS, samples=samples) for client in range(clients)]
    steps = EPOCHS * -(-samples // batch) * clients
    took = []
    for kind in (SequentialBackend, CohortBackend):
        model = FlatModel(copy.deepcopy(module))
        backend, sent = kind(model, work), Sent(model.read_state())
        backend.train(1, tasks, sent)
        seconds = []
        for _ in range(3):
            began = time.process_time()
            backend.train(1, tasks, sent)
            seconds.append(time.process_time() - began)
        took.append(min(seconds) / steps)
    return model, took, "lock-step" if CohortBackend.is_faster(model, work, clients) else "one after another"


if __name__ == "__main__":
    main()
