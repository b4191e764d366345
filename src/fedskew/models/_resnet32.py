"""ResNet-32 for CIFAR (FedVLS, table 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from fedskew.models._network import Network, picture
from fedskew.models._weights import draw_he_normal


class ResNet32(Network):
    """Five blocks each of 16, 32 and 64 channels (He et al., 2016, section 4.2); 464,154 parameters for 10 classes.

    Where the shape changes, the shortcut takes every second row and column and pads with channels of zeros (option A).
    All weights but batch norm's are drawn after He (fan in), the head's too, as in the code that FedVLS ported.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, _, _ = picture("resnet32", in_shape, 4)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks, channels = [], 16
        for width in (16, 32, 64):
            for _ in range(5):
                blocks.append(_Block(channels, width))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The average over places of the last block, `(batch, 64)`."""
        last: Tensor = self.blocks(relu(self.bn1(self.conv1(x))))
        return last.mean((-2, -1))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """He's normal for convolutions and the head's weights; PyTorch's default for the rest."""
        super().draw(generator)
        draw_he_normal(self, generator, fan="in")
        self.head.weight.normal_(0.0, math.sqrt(2.0 / self.head.in_features), generator=generator)


class _Block(nn.Module):
    """Two 3x3 convolutions; the first halves the picture where the channels double."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.new = out - channels
        self.conv1 = nn.Conv2d(channels, out, 3, stride=2 if self.new else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        if self.new:
            x = pad(x[..., ::2, ::2], (0, 0, 0, 0, self.new // 2, self.new // 2))
        return relu(out + x)
