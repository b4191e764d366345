"""Where the time of a local step goes, and how far it is from what this machine can do.

    python benchmarks/where_time_goes.py [--threads 1]

LeNet-5, batch 64, SGD with momentum and weight decay, on random tensors of CIFAR-10's shape (W1's step). Printed:

- ceilings: float32 matrix product of 1024 x 1024 (operations / s) and copy of 256 MB (bytes / s, read and written);
- a step of the plain loop, of the tuned loop and of fedskew (medians, taken in turns);
- the step's operations and the fewest bytes it can move, over the ceilings;
- the parts of fedskew's step (processor time, the least of several), and the rate of those that are products;
- how long the kernels take to compile, and to load when they have been compiled before.

`NUMBA_CPU_FEATURES=+avx2,+fma,-avx512f NUMBA_CPU_NAME=haswell` in the environment compiles for a processor without
AVX-512; a process of its own compiles into an empty folder each time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from local_training import BATCH, DECAY, EPOCHS, IMAGES, LR, MOMENTUM, by_hand, ours
from task import LeNet5
from torch.nn.functional import cross_entropy

from fedskew.local_steps import SGD, StepSettings
from fedskew.models import FlatModel, build

STEPS = EPOCHS * -(-IMAGES // BATCH)
CONVOLUTIONS = [2 * BATCH * 784 * 6 * 75, 2 * BATCH * 100 * 16 * 150]  # operations of a pass
LINEAR = 2 * BATCH * (400 * 120 + 120 * 84 + 84 * 10)
COMPILE = """
import time, torch
from fedskew.models import FlatModel, build
model = FlatModel(build("lenet5", 10, (3, 32, 32)))
import numba
began = time.perf_counter()
assert model.network.train().chain(torch.randn(3, 3, 32, 32)) is not None
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compute, bandwidth = ceilings()
    print(
        json.dumps(
            {"threads": arguments.threads, "gflops": round(compute / 1e9), "gb_per_s": round(bandwidth / 1e9, 1)}
        )
    )
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(IMAGES, 3, 32, 32, generator=drawn)
    targets = torch.randint(10, (IMAGES,), generator=drawn)
    network = build("lenet5", 10, (3, 32, 32), generator=drawn)
    plain = LeNet5()
    plain.load_state_dict(network.state_dict())
    loops: dict[str, Callable[[], Any]] = {
        "plain": by_hand(plain, inputs, targets, tuned=False),
        "tuned": by_hand(plain, inputs, targets, tuned=True),
        "fedskew": ours(network, inputs, targets),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop()
    for _ in range(arguments.repeats):
        for name, loop in loops.items():
            began = time.perf_counter()
            loop()
            seconds[name].append((time.perf_counter() - began) / STEPS)
    for name, own in seconds.items():
        ratio = statistics.median(mine / first for mine, first in zip(own, seconds["plain"], strict=True))
        print(json.dumps({"step": name, "ms": round(1000 * statistics.median(own), 2), "ratio": round(ratio, 3)}))
    # The first convolution's inputs, and the first linear layer's of a network without convolutions, have no gradient.
    operations = 2 * CONVOLUTIONS[0] + 3 * CONVOLUTIONS[1] + 3 * LINEAR
    moved = 4 * (2 * BATCH * 3072 + 4 * BATCH * (6 * 784 + 16 * 100) + 6 * 62_006)
    limits = {"operations": operations, "ms": round(1000 * operations / compute, 2)}
    print(json.dumps(limits | {"bytes": moved, "ms_of_bytes": round(1000 * moved / bandwidth, 2)}))
    for part, milliseconds, done in parts(network, inputs[:BATCH], targets[:BATCH]):
        rate = {"gflops": round(done / milliseconds / 1e6)} if done else {}
        print(json.dumps({"part": part, "ms": round(milliseconds, 3)} | rate))
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiling", "loading"):
            run = [sys.executable, "-c", COMPILE]
            said = subprocess.run(run, env=os.environ | {"NUMBA_CACHE_DIR": folder}, capture_output=True, check=True)
            print(json.dumps({what: round(float(said.stdout), 2)}))


def ceilings() -> tuple[float, float]:
    """Operations a second of a matrix product, and bytes a second of a copy: the best of many."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source, target = torch.randn(1 << 25), torch.empty(1 << 25)
    product = least(lambda: torch.mm(a, b), 1, 30)
    return 2 * 1024**3 / product, 2 * 4 * (1 << 25) / least(lambda: target.copy_(source), 1, 10)


def least(work: Callable[[], object], times: int = 20, turns: int = 9) -> float:
    """The least processor time of a call, in seconds."""
    found = []
    for _ in range(turns):
        began = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began) / times)
    return min(found)


def parts(network: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[tuple[str, float, int]]:
    """The parts of a step: what, milliseconds, operations."""
    model = FlatModel(network)
    chain = model.network.train().chain(x)
    assert chain is not None
    images, *dense = chain.stages
    gradient = torch.randn(BATCH, 10)
    settings = StepSettings(model.vector, LR, MOMENTUM, DECAY)
    momentum = SGD().init(settings)
    logits = torch.randn(BATCH, 10, requires_grad=True)
    with torch.no_grad():
        features = images.forward(x)

        def forward() -> None:
            values = features.clone()
            for stage in dense:
                values = stage.forward(values)

        def backward() -> None:
            values = gradient.clone()
            for stage in reversed(dense):
                values = stage.backward(values)

        forward()
        backward()
        convolutions = 2 * CONVOLUTIONS[0] + 3 * CONVOLUTIONS[1]
        timed = [
            ("convolutions, forward", least(lambda: images.forward(x)), sum(CONVOLUTIONS)),
            ("convolutions, backward", least(lambda: images.backward(features)), convolutions - sum(CONVOLUTIONS)),
            ("linear layers, forward", least(forward), LINEAR),
            ("linear layers, backward", least(backward), 2 * LINEAR),
            (
                "update",
                least(lambda: SGD().step_in_place(model.vector, lambda _: model.gradient, momentum, settings)),
                0,
            ),
        ]
    loss = least(lambda: torch.autograd.grad(cross_entropy(logits, y), logits))
    rest = least(lambda: model.differentiate(x, lambda outputs: cross_entropy(outputs.logits, y)))
    timed += [("loss, by autograd", loss, 0), ("all of a gradient", rest, 0)]
    return [(what, 1000 * took, done) for what, took, done in timed]


if __name__ == "__main__":
    main()
