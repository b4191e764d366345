"""What the papers' networks have in common: features, then one linear layer that gives raw logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._weights import draw_weights


class Network(nn.Module):
    """Features, then a linear head: `model(x)` is `model.head(model.features(x))`, raw logits `(batch, classes)`.

    No network ends in a softmax or log-softmax, whatever its paper's code does: the losses of this project read logits.
    """

    head: nn.Linear

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """The input of the last linear layer, `(batch, dim)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Raw logits, `(batch, classes)`."""
        logits: Tensor = self.head(self.features(x))
        return logits

    @classmethod
    def note(cls, options: Mapping[str, Any]) -> str:
        """What a user should know before a network with these options is trained; empty where there is nothing."""
        return ""

    def draw(self, generator: torch.Generator) -> None:
        """Give every weight its first value, in place, by PyTorch's default initialisation."""
        draw_weights(self, generator)


def picture(name: str, in_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """`in_shape` as (channels, height, width). Raises ArgumentError where network `name` can't take it."""
    if len(in_shape) != 3 or min(in_shape[1:]) < smallest:
        raise ArgumentError(
            f"in_shape: {name} takes pictures, (channels, height, width), of at least {smallest} x {smallest}; "
            f"got {tuple(in_shape)}"
        )
    channels, height, width = in_shape
    return channels, height, width


def side_after(side: int, kernel: int) -> int:
    """The side of a picture after a convolution without padding and 2 x 2 pooling."""
    return (side - kernel + 1) // 2
