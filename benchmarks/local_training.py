"""Local training against two hand-written loops that take the same steps: a plain one, and that loop tuned.

    python benchmarks/local_training.py [--task lenet5] [--repeats 7] [--threads 1] [--classes 10]

LeNet-5, batch 64, SGD 0.01 with momentum 0.9 and weight decay 5e-4, 5 epochs of one client's 500 images (random tensors
of CIFAR-10's shape: time does not depend on their values); or, as `--task`, mlp3 on MNIST's shape (batch 64) and on
that of digits (batch 16), or one epoch of VGG-11, ResNet-18 or FedLA's network on CIFAR-10's (batch 32). The three take
turns; the ratios are medians over turns.
Plain: nn modules, torch.optim.SGD, ReLU before pooling, as tutorials have it. Tuned: channels-last weights and inputs,
fused SGD, and 0 in place of denormal numbers, which a client of few classes (`--classes 1`) soon has.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.local_steps import SGD
from fedskew.models import FlatModel, build
from fedskew.objectives import INDEX, Objective
from fedskew.randomness import Purpose, generator

sys.path.insert(0, str(Path(__file__).resolve().parent / "contestants"))
from task import LeNet5

CrossEntropy = INDEX["cross_entropy"]

IMAGES, EPOCHS, BATCH, LR, MOMENTUM, DECAY = 500, 5, 64, 0.01, 0.9, 5e-4


class Task(NamedTuple):
    """A network, the shape of its images, and how it is trained."""

    network: str = "lenet5"
    shape: tuple[int, int, int] = (3, 32, 32)
    batch: int = BATCH
    epochs: int = EPOCHS
    lr: float = LR


TASKS = {
    "lenet5": Task(),
    "mnist": Task("mlp3", (1, 28, 28)),
    "digits": Task("mlp3", (1, 8, 8), batch=16),
    # With a larger rate two runs of PyTorch alone part within these 16 steps.
    **{name: Task(name, batch=32, epochs=1, lr=1e-5) for name in ("vgg11", "resnet18", "fedla_cifar")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="lenet5")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--classes", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    random = torch.Generator().manual_seed(0)
    task = TASKS[arguments.task]
    inputs = torch.randn(IMAGES, *task.shape, generator=random)
    targets = torch.randint(arguments.classes, (IMAGES,), generator=random)
    module = build(task.network, 10, task.shape, generator=random)
    plain = LeNet5() if task.network == "lenet5" else copy.deepcopy(module)
    plain.load_state_dict(module.state_dict())
    loops: dict[str, Callable[[], torch.Tensor]] = {
        "plain": by_hand(plain, inputs, targets, tuned=False, task=task),
        "tuned": by_hand(plain, inputs, targets, tuned=True, task=task),
        "fedskew": ours(module, inputs, targets, task),
    }
    ends = {name: loop() for name, loop in loops.items()}
    for name in ("tuned", "fedskew"):
        torch.testing.assert_close(ends[name], ends["plain"], rtol=1e-3, atol=1e-4)

    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(arguments.repeats):
        for name, loop in loops.items():
            began = time.perf_counter()
            loop()
            seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        print(
            json.dumps(
                {
                    "loop": name,
                    "seconds": round(statistics.median(values), 4),
                    "spread": [round(min(values), 4), round(max(values), 4)],
                }
            )
        )
    for floor in ("plain", "tuned"):
        ratios = [ours / theirs for ours, theirs in zip(seconds["fedskew"], seconds[floor], strict=True)]
        print(
            f"fedskew / {floor}: {statistics.median(ratios):.3f}  (median of {len(ratios)} turns, "
            f"{min(ratios):.3f} to {max(ratios):.3f}, {arguments.threads} thread)"
        )


def orders(epochs: int) -> list[torch.Tensor]:
    rng = generator(0, Purpose.SHUFFLE, 1, 0)
    return [torch.from_numpy(rng.permutation(IMAGES)) for _ in range(epochs)]


def by_hand(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, tuned: bool, task: Task = TASKS["lenet5"]
) -> Callable[[], torch.Tensor]:
    layout = torch.channels_last if tuned else torch.contiguous_format
    held = inputs.contiguous(memory_format=layout)

    def loop() -> torch.Tensor:
        torch.set_flush_denormal(tuned)
        model = copy.deepcopy(module).to(memory_format=layout).train()  # type: ignore[call-overload]
        optimiser = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=MOMENTUM, weight_decay=DECAY, fused=tuned)
        for order in orders(task.epochs):
            for rows in order.split(task.batch):
                optimiser.zero_grad()
                functional.cross_entropy(model(held[rows].contiguous(memory_format=layout)), targets[rows]).backward()
                optimiser.step()
        torch.set_flush_denormal(False)
        return nn.utils.parameters_to_vector([p.detach().contiguous() for p in model.parameters()])

    return loop


def ours(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, task: Task = TASKS["lenet5"]
) -> Callable[[], torch.Tensor]:
    model = FlatModel(copy.deepcopy(module))
    counts = np.bincount(targets.numpy(), minlength=10)[None].astype(float)
    data = PartitionedData(inputs, targets, [np.arange(IMAGES)], counts)
    training = LocalTraining(task.batch, task.lr, momentum=MOMENTUM, weight_decay=DECAY)
    backend = SequentialBackend(model, LocalWork(data, Objective(CrossEntropy()), SGD(), training, seed=0))
    sent = Sent(model.read_state())

    def loop() -> torch.Tensor:
        backend.train(1, [Assignment(0, task.epochs)], sent)
        trained = model.state_dict()
        return nn.utils.parameters_to_vector([trained[name].contiguous() for name, _ in module.named_parameters()])

    return loop


if __name__ == "__main__":
    main()
