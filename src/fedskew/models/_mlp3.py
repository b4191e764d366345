"""Three fully connected layers (FedVLS on MNIST; the paper gives no widths, its code has 784-200-200-10)."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.models._network import Network


class MLP3(Network):
    """inputs-200-200-classes with ReLU: 199,210 parameters on 28 x 28 pictures and 10 classes."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(in_shape), 200)
        self.fc2 = nn.Linear(200, 200)
        self.head = nn.Linear(200, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The second hidden layer, `(batch, 200)`."""
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))
