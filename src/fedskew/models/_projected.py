"""A network with a projection before its head, as MOON trains it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._network import Network
from fedskew.models._weights import draw_weights

WIDTH = 256


class Projected(Network):
    """encoder - linear d to d - ReLU - linear d to 256 - head, where the encoder's features are `(batch, d)`.

    The features of this network are the projection's output. The encoder is the given network, whose own head is taken
    away; the new head has as many outputs.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        head = getattr(network, "head", None)
        if not isinstance(head, nn.Linear) or not callable(getattr(network, "features", None)):
            raise ArgumentError(
                f"network: {type(network).__name__} does not say where its projection goes; give it a method "
                "features(x), and a linear layer self.head that turns its result, (batch, dim), into the logits"
            )
        width, classes = head.in_features, head.out_features
        network.head = nn.Identity()
        self.encoder = network
        self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, WIDTH))
        self.head = nn.Linear(WIDTH, classes)

    def features(self, x: Tensor) -> Tensor:
        """The projection, `(batch, 256)`."""
        # The encoder is called, not its features(): its dropout layers count their uses from one call to the next.
        projected: Tensor = self.projection(self.encoder(x))
        return projected


def with_projection(network: nn.Module, generator: torch.Generator) -> Projected:
    """`network`, changed in place, inside a `Projected` whose new layers are drawn from `generator`.

    torch's global generator is neither read nor set. Raises ArgumentError where the network has no features and head.
    """
    with torch.device("meta"):  # no storage and no draws: weights are drawn once, below
        model = Projected(network)
    for part in (model.projection, model.head):
        part.to_empty(device="cpu")
        draw_weights(part, generator)
    return model.train(network.training)
