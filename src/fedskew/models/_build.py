"""Networks by name, with weights drawn from a given generator."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedskew.errors import ArgumentError, nearest
from fedskew.models._cnn_mnist import CNNMnist
from fedskew.models._cnn_w2 import CNNW2
from fedskew.models._dropout import Dropout, swap_dropout
from fedskew.models._lenet5 import LeNet5
from fedskew.models._logistic import Logistic
from fedskew.models._mlp3 import MLP3
from fedskew.models._network import Network

INDEX: dict[str, type[Network]] = {
    "logistic": Logistic,
    "mlp3": MLP3,
    "cnn_mnist": CNNMnist,
    "lenet5": LeNet5,
    "cnn_w2": CNNW2,
}
"""The networks by the name that a config gives them."""


def build(
    name: str,
    num_classes: int,
    in_shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Network:
    """An untrained network for inputs of `in_shape` (without the batch) on the CPU; `options` are the network's own.

    Weights and biases come from PyTorch's default distributions, drawn from `generator`; without one, from a fresh
    generator seeded 0. torch's global generator is neither read nor set. Raises ArgumentError naming the argument.
    """
    if name not in INDEX:
        raise ArgumentError(f"name: no model is called {name!r}{nearest(name, INDEX)}")
    if num_classes < 1:
        raise ArgumentError(f"num_classes: must be at least 1, got {num_classes}")
    if not in_shape or min(in_shape) < 1:
        raise ArgumentError(f"in_shape: must be positive sizes without the batch, got {tuple(in_shape)}")
    network = INDEX[name]
    known = inspect.signature(network).parameters
    for option in options:
        if option not in known:
            raise ArgumentError(f"{option}: model {name!r} has no such option{nearest(option, known)}")
    with torch.device("meta"):  # no storage and no draws: weights are drawn once, below
        model = network(num_classes, tuple(in_shape), **options)
    model = model.to_empty(device="cpu")
    draw_weights(model, generator or torch.Generator().manual_seed(0))
    swap_dropout(model)
    return model


@torch.no_grad()
def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """PyTorch's default initialisation, in the order of the layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # What kaiming_uniform_ with a = sqrt(5) comes to, for weights and biases alike.
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            layer.weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=generator)
        elif isinstance(layer, Dropout):
            layer.key.zero_()
        elif any(True for _ in layer.parameters(recurse=False)) or any(True for _ in layer.buffers(recurse=False)):
            raise NotImplementedError(f"no initialisation for {type(layer).__name__}")
