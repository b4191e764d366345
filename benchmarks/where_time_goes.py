"""Where the time of a local step goes, and how far it is from what this machine can do.

    python benchmarks/where_time_goes.py [--threads 1]

LeNet-5, batch 64, SGD with momentum and weight decay, on random tensors of CIFAR-10's shape (W1's step). Printed:

- ceilings: float32 matrix product of 1024 x 1024 (operations / s) and copy of 256 MB (bytes / s, read and written);
- a step of the plain loop, of the tuned loop, of fedskew, and of the floor: the same arithmetic by hand, without
  autograd, models, records or any other bookkeeping (medians, taken in turns);
- the step's operations and the fewest bytes it can move, over the ceilings;
- fedskew's operations by torch.profiler, in groups.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import local_training
import torch
from local_training import BATCH, DECAY, EPOCHS, IMAGES, LR, MOMENTUM, by_hand, ours
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fedskew.models import build
from fedskew.models.conv_pool import FewInputChannels, FewOutputChannels

STEPS = EPOCHS * -(-IMAGES // BATCH)
GROUPS = {
    "convolution, forward": ("aten::mkldnn_convolution",),
    "convolution, backward": ("aten::convolution_backward",),
    "pooling, PyTorch's": ("aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward"),
    "pooling, by halves": ("aten::maximum", "aten::ge", "FewOutputChannels", "FewOutputChannelsBackward"),
    "linear layers": ("aten::addmm", "aten::mm"),
    "multiply, add, subtract": ("aten::mul", "aten::mul_", "aten::add", "aten::add_", "aten::sub", "aten::sub_"),
    "ReLU": ("aten::clamp_min", "aten::clamp_min_", "aten::relu", "aten::threshold_backward"),
    "copies, fills, batches": (
        "aten::copy_", "aten::fill_", "aten::zero_", "aten::index_select", "aten::cat", "aten::constant_pad_nd",
    ),
}  # fmt: skip


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
    plain = local_training.LeNet5()
    plain.load_state_dict(network.state_dict())
    loops: dict[str, Callable[[], Any]] = {
        "plain": by_hand(plain, inputs, targets, tuned=False),
        "tuned": by_hand(plain, inputs, targets, tuned=True),
        "fedskew": ours(network, inputs, targets),
        "floor": floor(network, inputs, targets),
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
        ratios = [mine / first for mine, first in zip(own, seconds["plain"], strict=True)]
        step = {
            "step": name,
            "ms": round(1000 * statistics.median(own), 2),
            "ratio": round(statistics.median(ratios), 3),
        }
        print(json.dumps(step))
    operations, moved = work()
    print(
        json.dumps(
            {
                "operations": operations,
                "ms_at_ceiling": round(1000 * operations / compute, 2),
                "bytes": moved,
                "ms_at_bandwidth": round(1000 * moved / bandwidth, 2),
            }
        )
    )
    shares(loops["fedskew"])


def ceilings() -> tuple[float, float]:
    """Operations a second of a matrix product, and bytes a second of a copy: the best of many."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    product = min(timed(lambda: torch.mm(a, b)) for _ in range(30))
    source, target = torch.randn(1 << 25), torch.empty(1 << 25)
    copy = min(timed(lambda: target.copy_(source)) for _ in range(10))
    return 2 * 1024**3 / product, 2 * 4 * (1 << 25) / copy


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def work() -> tuple[int, int]:
    """Multiplications and additions of one step, and bytes of what it must read and write once."""
    convolutions = [(784 * 6, 75, 2), (100 * 16, 150, 3)]  # outputs, inputs of each, passes (the first has no gradient)
    linear = [(120, 400, 3), (84, 120, 3), (10, 84, 3)]
    operations = sum(2 * BATCH * outputs * inputs * passes for outputs, inputs, passes in convolutions + linear)
    activations = [3 * 1024, 784 * 6, 196 * 6, 100 * 16, 25 * 16, 120, 84, 10]
    # Each is written and read forwards, and its gradient backwards; parameters, momentum and gradient are updated.
    return operations, 4 * (BATCH * 4 * sum(activations) + 62_006 * 6)


def floor(network: nn.Module, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """Forward, backward and SGD of LeNet-5, written out."""
    layers = (network.conv1, network.conv2, network.fc1, network.fc2, network.head)
    weights = [[value.detach().clone() for value in (layer.weight, layer.bias)] for layer in layers]
    weights[:2] = [[weight.contiguous(memory_format=torch.channels_last), bias] for weight, bias in weights[:2]]
    momenta = [[torch.zeros_like(value) for value in pair] for pair in weights]
    rows = inputs.permute(0, 2, 3, 1).flatten(1)

    def descend(place: int, *gradients: Tensor) -> None:
        for value, momentum, gradient in zip(weights[place], momenta[place], gradients, strict=True):
            value.sub_(momentum.mul_(MOMENTUM).add_(gradient.add_(value, alpha=DECAY)), alpha=LR)

    def step(batch: Tensor) -> None:
        (w1, b1), (w2, b2), (w3, b3), (w4, b4), (w5, b5) = weights
        x = rows.index_select(0, batch).view(-1, 32, 32, 3).permute(0, 3, 1, 2)
        first, second = Kept(False), Kept(True)
        a1 = FewOutputChannels.forward(first, x, w1, b1)
        y2 = FewInputChannels.forward(second, a1, w2, b2)
        pooled, places = torch.ops.aten.max_pool2d_with_indices(y2, [2, 2], [2, 2])
        a2 = pooled.clamp_min_(0)
        flat = a2.flatten(1)
        a3 = torch.addmm(b3, flat, w3.t()).clamp_min_(0)
        a4 = torch.addmm(b4, a3, w4.t()).clamp_min_(0)
        gradient = torch.addmm(b5, a4, w5.t()).softmax(1)
        gradient.scatter_add_(1, targets[batch, None], torch.full((len(batch), 1), -1.0)).div_(len(batch))
        g4 = torch.ops.aten.threshold_backward(gradient @ w5, a4, 0)
        g3 = torch.ops.aten.threshold_backward(g4 @ w4, a3, 0)
        g2 = torch.ops.aten.threshold_backward((g3 @ w3).view_as(a2), a2, 0)
        g2 = g2.contiguous(memory_format=torch.channels_last)
        g2 = torch.ops.aten.max_pool2d_with_indices_backward(g2, y2, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
        g1, *for_second = FewInputChannels.backward(second, g2)[:3]
        _, *for_first = FewOutputChannels.backward(first, g1)[:3]
        descend(4, gradient.t() @ a4, gradient.sum(0))
        descend(3, g4.t() @ a3, g4.sum(0))
        descend(2, g3.t() @ flat, g3.sum(0))
        descend(1, *for_second)
        descend(0, *for_first)

    def loop() -> None:
        with torch.no_grad():
            for _ in range(EPOCHS):
                for batch in torch.arange(IMAGES).split(BATCH):
                    step(batch)

    return loop


class Kept(SimpleNamespace):
    """What autograd would keep between an operation's two passes."""

    def __init__(self, needs_input: bool) -> None:
        super().__init__(needs_input_grad=(needs_input, True, True))

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def shares(loop: Callable[[], object]) -> None:
    """The table of a loop's operations by group."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        loop()
    spent = {event.key: event.self_cpu_time_total / 1000 for event in watched.key_averages()}
    whole = sum(spent.values())
    print("\n| operations | ms a step | share |\n| --- | ---: | ---: |")
    for group, names in GROUPS.items():
        own = sum(spent.pop(name, 0.0) for name in names)
        print(f"| {group} | {own / STEPS:.2f} | {own / whole:.0%} |")
    rest = sum(spent.values())
    print(f"| all else: loss, views, autograd, Python | {rest / STEPS:.2f} | {rest / whole:.0%} |")


if __name__ == "__main__":
    main()
