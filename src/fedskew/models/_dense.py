"""Networks of linear layers: `logistic`, `mlp3` and, on the mean of word embeddings, `fasttext`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.errors import ArgumentError
from fedskew.models._network import Network

PADDING = 0
UNKNOWN = 1


class Logistic(Network):
    """Multinomial logistic regression: one linear layer on the flattened input (FedPALS, synthetic task)."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(in_shape), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the flattened input, `(batch, inputs)`."""
        return x.flatten(1)


class MLP3(Network):
    """Three fully connected layers with ReLU (FedVLS on MNIST): inputs-200-200-classes.

    The paper gives no widths; these are the code's. 199,210 parameters on 28 x 28 images and 10 classes.

    Args:
        num_classes: Number of classes.
        in_shape: Shape of one input.
        width: Units of each hidden layer.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: int = 200) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(in_shape), width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the second hidden layer after ReLU, `(batch, width)`."""
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))


class FastText(Network):
    """A small fastText classifier (FedVLS on AG News): the mean of the token embeddings, linear `dim`, linear classes.

    Inputs are int64 token ids, `(batch, length)`. Padding (token 0) is left out of the mean. A token id outside the
    vocabulary counts as the unknown word (token 1); with ids ordered from frequent to rare words, these are the rarest.

    FedVLS does not publish its model for AG News, and its code keeps the defaults of PFLlib. This is PFLlib's
    "fastText", with vocabulary 98,635 and `dim` 32: 3,157,508 parameters for 4 classes. PFLlib's mean includes the
    padding, so that there the features of a text depend on its length.

    Args:
        num_classes: Number of classes.
        in_shape: Shape of one input, `(tokens,)`.
        vocabulary: Number of token ids.
        dim: Size of the embeddings and of the hidden layer.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], vocabulary: int = 98_635, dim: int = 32) -> None:
        super().__init__()
        if len(in_shape) != 1:
            raise ArgumentError(f"in_shape: fasttext takes texts, (tokens,), got {tuple(in_shape)}")
        for name, value, least in (("vocabulary", vocabulary, UNKNOWN + 1), ("dim", dim, 1)):
            if value < least:
                raise ArgumentError(f"{name}: must be at least {least}, got {value}")
        self.embedding = nn.Embedding(vocabulary, dim)
        self.fc1 = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the first linear layer, `(batch, dim)`; the mean of a text without tokens is 0."""
        x = torch.where(x < self.embedding.num_embeddings, x, UNKNOWN)
        real = (x != PADDING).unsqueeze(-1)
        mean = (self.embedding(x) * real).sum(1) / real.sum(1).clamp(min=1)
        hidden: Tensor = self.fc1(mean)
        return hidden
