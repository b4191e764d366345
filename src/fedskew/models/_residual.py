"""Residual networks: `resnet18`, `resnet32`, `resnet50` and `mobilenetv2`.

He et al., "Deep residual learning for image recognition", 2016: ResNet-18 (FedVLS) and ResNet-50 (FedPALS on PACS and
iWildCam) have torchvision's layout: in the bottleneck the 3x3 convolution has the stride ("v1.5"), and parameters have
torchvision's names, except that the last layer is "head" here instead of "fc". ResNet-32 (FedVLS) is the network of He
et al. for CIFAR. MobileNetV2 is that of Sandler et al., 2018, for small images (FedVLS on CIFAR and Tiny ImageNet).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from fedskew.models._network import Network, draw_he_normal, image_size

# Expansion, channels, blocks, stride of the first block: Sandler et al., 2018, table 2, except the second row's stride.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

Stem = Literal["imagenet", "cifar"]


class _Basic(nn.Module):
    """A basic residual block: two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut or _projection(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        return relu(out + self.downsample(x))


class _Bottleneck(nn.Module):
    """A bottleneck block: a 1x1 convolution to `width`, a 3x3 one, and a 1x1 one to four times the width."""

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
    """A residual network: a stem, four stages of blocks, average pooling."""

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
        """Return the spatial mean of the last stage, `(batch, 512)` for ResNet-18, `(batch, 2048)` for ResNet-50."""
        x = relu(self.bn1(self.conv1(x)))
        if self._stem == "imagenet":
            x = max_pool2d(x, 3, stride=2, padding=1)
        last: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return last.mean((-2, -1))

    def draw(self, generator: torch.Generator) -> None:
        """Draw convolutions from He's normal (fan out), as torchvision does, and all else from PyTorch's defaults."""
        super().draw(generator)
        draw_he_normal(self, generator, fan="out")


class ResNet18(_ResNet):
    """ResNet-18: eight basic blocks, 64 to 512 channels.

    11,181,642 parameters for 10 classes, 11,173,962 with the CIFAR stem.

    Args:
        stem: "imagenet" is torchvision's stem (7x7, stride 2, pooling), which FedVLS' code uses even for 32 x 32
            images; "cifar" (3x3, stride 1) is the usual one for such images.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], stem: Stem = "imagenet") -> None:
        channels, _, _ = image_size("resnet18", in_shape, 8)
        super().__init__(_Basic, (2, 2, 2, 2), num_classes, channels, stem)


class ResNet50(_ResNet):
    """ResNet-50: sixteen bottleneck blocks, 256 to 2048 channels; 23,522,375 parameters for 7 classes."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        channels, _, _ = image_size("resnet50", in_shape, 32)
        super().__init__(_Bottleneck, (3, 4, 6, 3), num_classes, channels, "imagenet")

    @classmethod
    def note(cls, options: Mapping[str, Any]) -> str:
        """Return where the weights come from."""
        path = options.get("weights")
        if path is None:
            return "resnet50 starts from random weights, not from pre-trained ones (model.weights = a local file)"
        return f"resnet50 starts from {path}; its head is drawn anew if the file has other classes"


class ResNet32(Network):
    """ResNet-32 for CIFAR (FedVLS, table 3); 464,154 parameters for 10 classes.

    Five blocks each of 16, 32 and 64 channels (He et al., 2016, section 4.2). Between stages, the shortcut takes every
    second row and column and adds channels of zeros (option A). All weights except batch norm's are drawn from He's
    normal distribution (fan in), as in the code that FedVLS ported.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, _, _ = image_size("resnet32", in_shape, 4)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        blocks, channels = [], 16
        for width in (16, 32, 64):
            for _ in range(5):
                shortcut = _Padded(width - channels) if width > channels else None
                blocks.append(_Basic(channels, width, 2 if shortcut else 1, shortcut))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(64, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the spatial mean of the last block, `(batch, 64)`."""
        last: Tensor = self.blocks(relu(self.bn1(self.conv1(x))))
        return last.mean((-2, -1))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw convolutions and the head's weights from He's normal, and all else from PyTorch's defaults."""
        super().draw(generator)
        draw_he_normal(self, generator, fan="in")
        self.head.weight.normal_(0.0, math.sqrt(2.0 / self.head.in_features), generator=generator)


class _Padded(nn.Module):
    """A shortcut: every second row and column, and channels of zeros on both sides, so many in all."""

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        return pad(x[..., ::2, ::2], (0, 0, 0, 0, self.new // 2, self.new // 2))


class MobileNetV2(Network):
    """MobileNetV2: seventeen inverted residual blocks, 1280 features, average pooling.

    2,296,922 parameters for 10 classes. Three choices follow FedVLS' code: stride 1 in the stem and in the stage of 24
    channels, so that 32 x 32 images end as 4 x 4; ReLU instead of the paper's ReLU6; and a 1x1 projection on the
    shortcut of blocks that keep the size but change the width. (The paper's table shows the layout for 224 x 224.)
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, _, _ = image_size("mobilenetv2", in_shape, 8)
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        blocks, channels = [], 32
        for expansion, out, count, stride in _STAGES:
            for place in range(count):
                blocks.append(_Inverted(channels, out, expansion, stride if place == 0 else 1))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.conv2 = nn.Conv2d(channels, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280)
        self.head = nn.Linear(1280, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the spatial mean of the last convolution after ReLU, `(batch, 1280)`."""
        x = self.blocks(relu(self.bn1(self.conv1(x))))
        return relu(self.bn2(self.conv2(x))).mean((-2, -1))


class _Inverted(nn.Module):
    """An inverted residual block: a 1x1 convolution to more channels, a depthwise 3x3 one, and a 1x1 one to fewer."""

    def __init__(self, channels: int, out: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = expansion * channels
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.shortcut = _projection(channels, out, stride) if stride == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))))
        out: Tensor = self.bn3(self.conv3(inner))
        return out if self.shortcut is None else out + self.shortcut(x)


def _projection(channels: int, out: int, stride: int) -> nn.Module:
    """Make a shortcut: the identity, or a 1x1 convolution if the shapes of input and output differ."""
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
