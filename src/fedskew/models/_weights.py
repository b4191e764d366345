"""First values of weights: PyTorch's default distributions and He's, from a given generator."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from fedskew.models._dropout import Dropout


@torch.no_grad()
def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """PyTorch's default initialisation, in the order of the layers. torch's global generator is not touched."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # What kaiming_uniform_ with a = sqrt(5) comes to, for weights and biases alike.
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            layer.weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=generator)
        elif isinstance(layer, nn.Embedding):
            layer.weight.normal_(generator=generator)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()  # ones and zeros, and the running statistics: nothing is drawn
        elif isinstance(layer, Dropout):
            layer.key.zero_()
        elif any(True for _ in layer.parameters(recurse=False)) or any(True for _ in layer.buffers(recurse=False)):
            raise NotImplementedError(f"no initialisation for {type(layer).__name__}")


@torch.no_grad()
def draw_he_normal(model: nn.Module, generator: torch.Generator, fan: Literal["in", "out"]) -> None:
    """Convolution weights from a normal of variance 2 / fan (He et al., 2015); their biases 0.

    The fan is kernel height times width, times the channels that go in or come out.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            values = layer.weight[0] if fan == "in" else layer.weight[:, 0]
            layer.weight.normal_(0.0, math.sqrt(2.0 / values.numel()), generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
