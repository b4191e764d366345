"""A small fastText classifier for tokens (FedVLS on AG News)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._network import Network

PADDING = 0
UNKNOWN = 1


class FastText(Network):
    """The mean of the tokens' embeddings, linear `dim`, linear classes; padding (token 0) is left out of the mean.

    Inputs are int64 token ids, `(batch, length)`; one that the `vocabulary` doesn't reach counts as the unknown word
    (token 1), which is right where ids go from frequent to rare. FedVLS doesn't publish its model for AG News; its
    code keeps the defaults of PFLlib, whose "fastText" this is with vocabulary 98,635 and `dim` 32: 3,157,508
    parameters for 4 classes. PFLlib's mean counts the padding, so that there a text's length scales its features.
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
        """The first linear layer, `(batch, dim)`; a text without a token has the mean 0."""
        x = torch.where(x < self.embedding.num_embeddings, x, UNKNOWN)
        real = (x != PADDING).unsqueeze(-1)
        mean = (self.embedding(x) * real).sum(1) / real.sum(1).clamp(min=1)
        hidden: Tensor = self.fc1(mean)
        return hidden
