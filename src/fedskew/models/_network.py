"""What the papers' networks share: features, a linear layer that gives raw logits, initialisation of weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._dropout import Dropout


class Outputs(NamedTuple):
    """What a network returns to an objective.

    Attributes:
        features: The input of the last linear layer, `(batch, dim)`.
        logits: Raw logits, `(batch, classes)`.
    """

    features: Tensor
    logits: Tensor


class Network(nn.Module):
    """Features, then a linear head: `model(x)` is `model.head(model.features(x))`, raw logits `(batch, classes)`.

    No network ends in a softmax or log-softmax, whatever its paper's code does: the losses of this project read logits.

    Attributes:
        head: The last linear layer.
    """

    head: nn.Linear

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Return the input of the last linear layer, `(batch, dim)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return raw logits, `(batch, classes)`."""
        logits: Tensor = self.head(self.features(x))
        return logits

    @classmethod
    def note(cls, options: Mapping[str, Any]) -> str:
        """Say what a user should know before training a network with these options; empty where there is nothing."""
        return ""

    def draw(self, generator: torch.Generator) -> None:
        """Initialise every weight in place, by PyTorch's default distributions."""
        draw_weights(self, generator)


def image_size(name: str, in_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return `in_shape` as (channels, height, width), or raise ArgumentError if network `name` can't take it."""
    if len(in_shape) != 3 or min(in_shape[1:]) < smallest:
        raise ArgumentError(
            f"in_shape: {name} takes images, (channels, height, width), of at least {smallest} x {smallest}; "
            f"got {tuple(in_shape)}"
        )
    channels, height, width = in_shape
    return channels, height, width


@torch.no_grad()
def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Initialise as PyTorch does by default, layer by layer, without torch's global generator."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            # Equal to kaiming_uniform_ with a = sqrt(5), for weights and biases alike.
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            layer.weight.uniform_(-bound, bound, generator=generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=generator)
        elif isinstance(layer, nn.Embedding):
            layer.weight.normal_(generator=generator)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()  # ones, zeros and the running statistics: nothing random
        elif isinstance(layer, Dropout):
            layer.key.zero_()
        elif any(True for _ in layer.parameters(recurse=False)) or any(True for _ in layer.buffers(recurse=False)):
            raise NotImplementedError(f"no initialisation for {type(layer).__name__}")


@torch.no_grad()
def draw_he_normal(model: nn.Module, generator: torch.Generator, fan: Literal["in", "out"]) -> None:
    """Draw convolution weights from a normal of variance 2 / fan (He et al., 2015), and set their biases to 0.

    The fan is kernel height times kernel width times the number of input or output channels.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            values = layer.weight[0] if fan == "in" else layer.weight[:, 0]
            layer.weight.normal_(0.0, math.sqrt(2.0 / values.numel()), generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
