"""Multinomial logistic regression (FedPALS, synthetic task)."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedskew.models._network import Network


class Logistic(Network):
    """One linear layer on the flattened input; the features are that input."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(in_shape), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The flattened input, `(batch, inputs)`."""
        return x.flatten(1)
