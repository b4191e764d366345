"""What the round loop itself costs: clients that do nothing.

    python benchmarks/round_loop.py [--rounds 300]

100 clients of which 10 take part, LeNet-5's 62,006 parameters, evaluation and checkpoints off: the target is 2 ms a
round. Every combination of the methods' selections and weightings is timed in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from fedskew import methods
from fedskew.engine import Assignment, Backend, Federation, Sent, Update
from fedskew.models import ModelState

CLIENTS, COHORT, CLASSES, PARAMETERS = 100, 10, 10, 62_006


class Idle(Backend):
    """A backend whose clients send a small update that is already there."""

    def __init__(self) -> None:
        self.change = torch.full((PARAMETERS,), 1e-6)
        self.norm = self.change.norm()

    def train(self, round: int, cohort: Sequence[Assignment], sent: Sent) -> list[Update]:
        model = sent.model
        return [Update(task.client, self.change, self.norm, model.buffers, model.integers, 1, 0.0) for task in cohort]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(500, mix) for mix in rng.dirichlet(np.full(CLASSES, 0.1), CLIENTS)]).astype(
        float
    )
    target = np.full(CLASSES, 1 / CLASSES)
    for preset in ("fedavg", "fedentopt", "fedla", "fedpals", "fedentopt+fedpals"):
        method = methods.build(methods.expand({"preset": preset}))
        federation = Federation(method, Idle(), counts, target, COHORT / CLIENTS, seed=0)
        state = federation.start(ModelState(torch.zeros(PARAMETERS), torch.zeros(0), torch.zeros(0, dtype=torch.int64)))
        times = []
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            state, _ = federation.run_round(state)
            times.append(1000 * (time.perf_counter() - began))
        print(
            json.dumps(
                {
                    "method": preset,
                    "ms_per_round": round(statistics.median(times), 3),
                    "p95": round(float(np.quantile(times, 0.95)), 3),
                    "threads": arguments.threads,
                }
            )
        )


if __name__ == "__main__":
    main()
