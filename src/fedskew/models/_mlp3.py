"""Three fully connected layers (FedVLS on MNIST; the paper gives no widths, its code has 784-200-200-10)."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.models._network import Network


class MLP3(Network):
    """inputs-200-200-classes with ReLU: 199,210 parameters on 28 x 28 pictures and 10 classes. `width`: the 200."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: int = 200) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(in_shape), width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The second hidden layer, `(batch, width)`."""
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))
