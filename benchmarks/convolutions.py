"""A step's convolutions of a whole cohort on a GPU: one convolution with a group for each client, and one product.

    python benchmarks/convolutions.py [--device cuda]

Layers are those of W1 (LeNet-5, 10 clients, batches of 64) and W2 (50 clients, batches of 10). Printed for either way:
microseconds forward, and forward with the gradients that training needs (a first layer's inputs need none), medians of
five turns of CUDA graphs, as steps are; the largest error of values and gradients of two clients and four images,
relative to the largest value, against 64 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from fedskew.engine.cohort._layers import _Conv2d

LAYERS = {
    "W1, first": (10, 64, nn.Conv2d(3, 6, 5), 32),
    "W1, second": (10, 64, nn.Conv2d(6, 16, 5), 14),
    "W2, first": (50, 10, nn.Conv2d(3, 32, 3), 32),
    "W2, second": (50, 10, nn.Conv2d(32, 64, 3), 30),
}
Way = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, Callable[[nn.Conv2d], Way]] = {
    "groups": lambda layer: vmap(functional.conv2d),
    "product": lambda layer: _Conv2d(layer)._at_once,
}
REPEATS, TURNS = 50, 5


def microseconds(function: Callable[[], object], device: str) -> float:
    """Return the median time of a call."""
    repeats, call = 1, function
    if device == "cuda":
        own = torch.cuda.Stream()
        with torch.cuda.stream(own):
            for _ in range(3):
                function()
        own.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        repeats, call = REPEATS, graph.replay
    taken = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / repeats * 1e6)
    return median(taken)


def gradients(way: Way, x: Tensor, weight: Tensor, by_x: bool = True) -> tuple[Tensor, ...]:
    """Return a layer's values, and the gradients of the sum of their squares."""
    own = [part.detach().requires_grad_() for part in ((weight, x) if by_x else (weight,))]
    y = way(own[1] if by_x else x, own[0])
    return y.detach(), *torch.autograd.grad(y.square().sum(), own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    torch.manual_seed(0)
    print("| layer | way | forward, us | with gradients, us | error |\n| --- | --- | ---: | ---: | ---: |")
    for name, (clients, batch, layer, side) in LAYERS.items():
        x = torch.randn(clients, batch, layer.in_channels, side, side, device=device)
        weight = torch.randn(clients, *layer.weight.shape, device=device) / layer.weight[0].numel() ** 0.5
        few = x[:2, :4], weight[:2]
        exact = gradients(WAYS["groups"](layer), few[0].double(), few[1].double())
        for kind, made in WAYS.items():
            way = made(layer)
            found = zip(gradients(way, *few), exact, strict=True)
            error = max(float((one - two).abs().max() / two.abs().max()) for one, two in found)
            forward = microseconds(partial(way, x, weight), device)
            whole = microseconds(partial(gradients, way, x, weight, name.endswith("second")), device)
            print(f"| {name} | {kind} | {forward:.0f} | {whole:.0f} | {error:.0e} |", flush=True)


if __name__ == "__main__":
    main()
