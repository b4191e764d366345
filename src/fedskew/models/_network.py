"""The base class of the papers' networks, with a linear head that gives raw logits, and initialisation of weights."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._dropout import Dropout

SHORTEST = 1e-6
"""A vector of less length has no direction."""


class Outputs(NamedTuple):
    """What an objective reads: the input of the last linear layer, `(batch, dim)`, and logits, `(batch, classes)`."""

    features: Tensor
    logits: Tensor


class Network(nn.Module):
    """Base class of networks: `model(x)` is `model.head(model.features(x))`, raw logits `(batch, classes)`.

    No network ends in a softmax or log-softmax, even if its paper's code does, because losses read logits.
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
        """Return what a user should know before training a network with these options; empty by default."""
        return ""

    def draw(self, generator: torch.Generator) -> None:
        """Draw every weight from PyTorch's default distributions, in place."""
        draw_weights(self, generator)


def linear_head(network: nn.Module) -> nn.Linear:
    """Return the last linear layer of a network, its `head`."""
    head = getattr(network, "head", None)
    if not isinstance(head, nn.Linear):
        raise ArgumentError(
            f"network: {type(network).__name__} does not say where its features end; give it a linear layer self.head "
            "that turns them, (batch, dim), into the logits"
        )
    return head


def lengths_of(vectors: Tensor) -> Tensor:
    """Return the length of each row, `(..., 1)`; 1 for one below 1e-6, which has no direction."""
    return torch.threshold(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True), SHORTEST, 1.0)


def unit_rows(vectors: Tensor) -> Tensor:
    """Divide each row by its length; one below 1e-6 has no direction and stays: gradients grow by 1e6 at most."""
    return vectors / lengths_of(vectors)


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
    """Draw weights layer by layer from PyTorch's default distributions, without its global generator."""
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
            layer.reset_parameters()  # sets ones and zeros; draws nothing
        elif isinstance(layer, Dropout):
            layer.key.zero_()
        elif any(True for _ in layer.parameters(recurse=False)) or any(True for _ in layer.buffers(recurse=False)):
            raise NotImplementedError(f"no initialisation for {type(layer).__name__}")


@torch.no_grad()
def draw_he_normal(model: nn.Module, generator: torch.Generator, fan: Literal["in", "out"]) -> None:
    """Draw convolution weights from a normal distribution of variance 2 / fan (He et al., 2015); set biases to 0.

    The fan is kernel height times kernel width times the number of input or output channels.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            values = layer.weight[0] if fan == "in" else layer.weight[:, 0]
            layer.weight.normal_(0.0, math.sqrt(2.0 / values.numel()), generator=generator)
            if layer.bias is not None:
                layer.bias.zero_()
