"""Encoders side by side under one linear head: the model that FedConcat ends with."""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._network import Network
from fedskew.models._weights import draw_weights


class Concatenated(Network):
    """head(encoder_1(x), ..., encoder_K(x)): K frozen copies of a network without its head, and one new linear head.

    With P parameters and d features in one encoder it has `K * P + K * d * classes + classes` parameters, of which only
    the head's are trainable. Encoders stay in eval mode, whatever `train` says (the authors' code leaves them in train
    mode, so that the batch decides what its samples' features are). A run's own model is read back by

        model = Concatenated(build("lenet5", 10, (1, 28, 28)), encoders=5)
        model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

    `network` must have a linear layer `head` that turns its features, `(batch, d)`, into what it returns; it is not
    changed. The new head's weights are drawn from `generator`; without one, from a fresh generator seeded 0.
    Raises ArgumentError for a network without such a head, and for fewer than one encoder.
    """

    def __init__(self, network: nn.Module, encoders: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        head = getattr(network, "head", None)
        if not isinstance(head, nn.Linear):
            raise ArgumentError(
                f"network: {type(network).__name__} does not say where its features end; give it a linear layer "
                "self.head that turns them, (batch, dim), into the logits"
            )
        if encoders < 1:
            raise ArgumentError(f"encoders: must be at least 1, got {encoders}")
        self.encoders = nn.ModuleList(_encoder(network) for _ in range(encoders))
        self.encoders.requires_grad_(False).eval()
        with torch.device("meta"):  # no storage and no draws: weights are drawn once, below
            self.head = nn.Linear(encoders * head.in_features, head.out_features, bias=head.bias is not None)
        self.head.to_empty(device="cpu")
        draw_weights(self.head, generator or torch.Generator().manual_seed(0))
        self.head.to(head.weight.device)

    def features(self, x: Tensor) -> Tensor:
        """The encoders' features one after another, `(batch, encoders * d)`."""
        return torch.cat([encoder(x) for encoder in self.encoders], dim=1)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the encoders, which stay in eval mode."""
        super().train(mode)
        self.encoders.eval()
        return self

    def put(self, place: int, network: nn.Module) -> None:
        """Copy all of `network` but its head into the encoder at `place`."""
        state = {name: value for name, value in network.state_dict().items() if not name.startswith("head.")}
        self.encoders[place].load_state_dict(state)


def _encoder(network: nn.Module) -> nn.Module:
    encoder = copy.deepcopy(network)
    encoder.head = nn.Identity()
    return encoder
