"""Residual networks in torchvision's layout: ResNet-18 (FedVLS) and ResNet-50 (FedPALS on PACS and iWildCam).

He et al., "Deep residual learning for image recognition", 2016; in the bottleneck the 3x3 convolution has the stride,
as in torchvision ("v1.5"). Parameters have torchvision's names, but for its last layer "fc", which here is "head".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedskew.models._network import Network, picture
from fedskew.models._pretrained import read_pretrained
from fedskew.models._weights import draw_he_normal

Stem = Literal["imagenet", "cifar"]


class _Basic(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(out + self.downsample(x))


class _Bottleneck(nn.Module):
    """1x1 to `width`, 3x3, 1x1 to four times the width."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = self.expansion * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = _projection(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))))
        return relu(self.bn3(self.conv3(out)) + self.downsample(x))


class _ResNet(Network):
    """Stem, four stages of residual blocks, average pooling."""

    def __init__(
        self, block: type[_Basic | _Bottleneck], depths: tuple[int, ...], num_classes: int, channels: int, stem: Stem
    ) -> None:
        super().__init__()
        self._stem = stem
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        stages, channels = [], 64
        for number, depth in enumerate(depths):
            width, blocks = 64 * 2**number, []
            for place in range(depth):
                blocks.append(block(channels, width, stride=2 if number and not place else 1))
                channels = block.expansion * width
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.head = nn.Linear(channels, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The average over places of the last stage, `(batch, 512)` for ResNet-18, `(batch, 2048)` for ResNet-50."""
        x = relu(self.bn1(self.conv1(x)))
        if self._stem == "imagenet":
            x = max_pool2d(x, 3, stride=2, padding=1)
        last: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return last.mean((-2, -1))

    def draw(self, generator: torch.Generator) -> None:
        """He's normal for convolutions (fan out), as torchvision; PyTorch's default for the rest."""
        super().draw(generator)
        draw_he_normal(self, generator, fan="out")


class ResNet18(_ResNet):
    """Eight basic blocks, 64 to 512 channels; 11,181,642 parameters for 10 classes, 11,173,962 with the CIFAR stem.

    `stem`: "imagenet", torchvision's (7x7, stride 2, and pooling), is what FedVLS' code takes even for 32 x 32
    pictures; "cifar" (3x3, stride 1) is the usual one for those.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], stem: Stem = "imagenet") -> None:
        channels, _, _ = picture("resnet18", in_shape, 8)
        super().__init__(_Basic, (2, 2, 2, 2), num_classes, channels, stem)


class ResNet50(_ResNet):
    """Sixteen bottleneck blocks, 256 to 2048 channels; 23,522,375 parameters for 7 classes.

    `weights`: a local file with torchvision's state dict, `.pth` (read without executing anything in it) or
    `.safetensors`. Where its head has another number of classes, the head is left as drawn. Without it all weights are
    random, and a run says so.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], weights: str | Path | None = None) -> None:
        channels, _, _ = picture("resnet50", in_shape, 32)
        super().__init__(_Bottleneck, (3, 4, 6, 3), num_classes, channels, "imagenet")
        self._weights = weights

    def draw(self, generator: torch.Generator) -> None:
        """As torchvision; then the values of the file, if one was given."""
        super().draw(generator)
        if self._weights is not None:
            read_pretrained(self, self._weights)

    @classmethod
    def note(cls, options: Mapping[str, Any]) -> str:
        """Where the weights come from."""
        path = options.get("weights")
        if path is None:
            return "resnet50 starts from random weights, not from pre-trained ones (model.weights = a local file)"
        return f"resnet50 starts from {path}; its head is drawn anew where that is for other classes"


def _projection(channels: int, out: int, stride: int) -> nn.Module:
    """The shortcut: the input itself, or a 1x1 convolution where its shape differs from the block's output."""
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
