"""VGG-11 without batch norm, for small pictures (FedEntOpt; the "vgg" of NIID-Bench)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.errors import ArgumentError
from fedskew.models._dropout import Dropout
from fedskew.models._network import Network, picture
from fedskew.models._weights import draw_he_normal

_POOL = 0
_CONFIG_A = (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL)


class VGG11(Network):
    """Configuration A of Simonyan and Zisserman (2015): eight 3x3 convolutions, five poolings; head 512-512-classes.

    Dropout 0.5 before both hidden layers; convolutions drawn after He (fan out), as in NIID-Bench. 9,750,922 parameters
    on 3 x 32 x 32 and 10 classes. FedEntOpt's text says "over 4 million", which fits no VGG-11: its first six
    convolutions alone have more. `width` multiplies every number of channels and hidden units (0.65 gives 4.1 million).
    ReLU comes after pooling where there is one: the same function, on a quarter of the values.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: float = 1.0) -> None:
        super().__init__()
        channels, rows, columns = picture("vgg11", in_shape, 32)
        if not 0 < width <= 16:
            raise ArgumentError(f"width: must be above 0 and at most 16, got {width}")
        layers: list[nn.Module] = []
        for size in _CONFIG_A:
            if size == _POOL:
                layers.insert(-1, nn.MaxPool2d(2))  # before the ReLU that came last
                rows, columns = rows // 2, columns // 2
                continue
            out = _scaled(size, width)
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        self.convolutions = nn.Sequential(*layers)
        hidden = _scaled(512, width)
        self.drop1 = Dropout(0.5)
        self.fc1 = nn.Linear(channels * rows * columns, hidden)
        self.drop2 = Dropout(0.5)
        self.fc2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The second hidden layer after ReLU, `(batch, 512)` at width 1."""
        x = self.drop1(self.convolutions(x).flatten(1))
        x = self.drop2(relu(self.fc1(x)))
        return relu(self.fc2(x))

    def draw(self, generator: torch.Generator) -> None:
        """He's normal for convolutions, their biases 0; PyTorch's default for the rest."""
        super().draw(generator)
        draw_he_normal(self, generator, fan="out")


def _scaled(size: int, width: float) -> int:
    return max(1, round(size * width))
