"""What a client's step costs by its optimiser: processor time of a step, the least of several turns.

    python benchmarks/optimizers.py [--turns 9]

LeNet-5 and a wide MLP, batch 32, one thread; as a chain without autograd, and the same network as it is written.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.engine import Assignment, Group, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.methods import build, expand
from fedskew.models import FlatModel
from fedskew.models import build as network

STEPS, BATCH = 16, 32
OPTIMISERS: dict[str, dict[str, Any]] = {
    "SGD, momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "SGD, momentum, bf16": {"momentum": 0.9, "weight_decay": 0.01, "precision": "bf16"},
    "AdamW": {"optimizer": "adamw", "weight_decay": 0.01},
    "AdamW, clipped": {"optimizer": "adamw", "weight_decay": 0.01, "clip_norm": 1.0},
    "AdamW, groups": {"optimizer": "adamw", "weight_decay": 0.01, "groups": (Group("head.*", 0.01, 0.0),)},
}


class AsWritten(nn.Module):
    """A network whose graph can't be read, so that autograd computes its gradient."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.head = inner, inner.head

    def forward(self, x: Tensor) -> Any:
        """Branch on a value."""
        return self.inner(x) if float(x[0].sum()) > -1e9 else x


def milliseconds(module: nn.Module, shape: tuple[int, ...], turns: int, **training: Any) -> float:
    """Return the processor time of a local step."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(BATCH * 8, *shape, generator=draw), torch.arange(BATCH * 8) % 10
    data = PartitionedData(inputs, targets, [np.arange(BATCH * 8)], np.full((1, 10), BATCH * 0.8))
    method, model = build(expand({})), FlatModel(module)
    settings = LocalTraining(batch_size=BATCH, lr=0.001, **training)
    backend = SequentialBackend(model, LocalWork(data, method.objective, method.local_step, settings, 0))
    sent, times = Sent(model.read_state()), []
    for _ in range(turns):
        began = time.process_time()
        backend.train(1, [Assignment(0, STEPS / 8)], sent)
        times.append(time.process_time() - began)
    return 1000 * min(times) / STEPS


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    networks = {"lenet5": ((3, 32, 32), {}), "mlp3": ((1, 28, 28), {"width": 512})}
    print("| a step, ms | " + " | ".join(f"{name}, {how}" for name in networks for how in ("chain", "autograd")) + " |")
    print("|---" + "|---:" * 2 * len(networks) + "|")
    for said, training in OPTIMISERS.items():
        found = []
        for name, (shape, options) in networks.items():
            for around in (lambda inner: inner, AsWritten):
                module = around(network(name, 10, shape, generator=torch.Generator().manual_seed(0), **options))
                own = dict(training)
                if around is AsWritten and "groups" in own:
                    own["groups"] = tuple(Group(f"inner.{one.match}", *one[1:]) for one in own["groups"])
                found.append(milliseconds(module, shape, turns, **own))
        print(f"| {said} | " + " | ".join(f"{value:.2f}" for value in found) + " |")


if __name__ == "__main__":
    main()
