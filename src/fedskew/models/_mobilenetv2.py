"""MobileNetV2 for small images (FedVLS on CIFAR and Tiny ImageNet)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.models._network import Network, image_size

# Expansion, channels, blocks, stride of the first block: Sandler et al., 2018, table 2, except the second row's stride.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


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
                blocks.append(_Block(channels, out, expansion, stride if place == 0 else 1))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.conv2 = nn.Conv2d(channels, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280)
        self.head = nn.Linear(1280, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the spatial mean of the last convolution after ReLU, `(batch, 1280)`."""
        x = self.blocks(relu(self.bn1(self.conv1(x))))
        return relu(self.bn2(self.conv2(x))).mean((-2, -1))


class _Block(nn.Module):
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
        self.shortcut: nn.Module | None = None
        if stride == 1 and channels == out:
            self.shortcut = nn.Identity()
        elif stride == 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.bn2(self.conv2(relu(self.bn1(self.conv1(x))))))
        out: Tensor = self.bn3(self.conv3(inner))
        return out if self.shortcut is None else out + self.shortcut(x)
