"""Dropout whose mask is a function of a key, so that a step gives the same result on any device and in any backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.randomness import at_least


class Dropout(nn.Module):
    """Zeroes each element with probability `p` and scales the others by 1 / (1 - p); identity in eval mode.

    The mask depends on `key`, `layer` and `uses`, and on the element's row-major position in the batch. It is the same
    on every device, and under `torch.func.vmap` with a mapped key. `swap` numbers the layers and counts their
    uses; call it once on a network of your own.

    Args:
        p: Probability of zeroing an element.

    Attributes:
        key: A 0-d int64 buffer outside the state dict, set before each step.
        layer: The layer's number among the model's dropout layers.
        uses: How often the layer has been used in this forward pass.

    Raises:
        ArgumentError: `p` is outside [0, 1].
    """

    key: Tensor

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(f"p: must be in [0, 1], got {p}")
        self.p = p
        self.layer = 0
        self.uses = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with some elements zeroed and the others scaled."""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        shape = self._mask_shape(x)
        places = torch.arange(shape.numel(), device=x.device).view(shape)
        kept = at_least(self.p, self.layer, self.uses, self.key, places)
        self.uses += 1
        return x * (kept * (1.0 / (1.0 - self.p))).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the layer's description for the printed model."""
        return f"p={self.p}, layer={self.layer}"

    def _mask_shape(self, x: Tensor) -> torch.Size:
        return x.shape

    @staticmethod
    def keys_of(model: nn.Module) -> list[str]:
        """Return the names of the dropout layers' `key` buffers, as `torch.func.functional_call` takes them."""
        return [f"{name}.key".lstrip(".") for name, layer in model.named_modules() if isinstance(layer, Dropout)]

    @staticmethod
    def swap(model: nn.Module) -> nn.Module:
        """Replace a model's nn.Dropout, 1d, 2d and 3d layers by keyed ones, in place, and number all dropout layers.

        Calls of `torch.nn.functional.dropout` inside a `forward` can't be detected; use layers instead.

        Returns:
            The model, or its replacement if it is a dropout layer itself.

        Raises:
            ArgumentError: A layer draws from torch's global generator and has no keyed counterpart.
        """
        ours: dict[nn.Module, Dropout] = {}
        for name, layer in model.named_modules():
            _refuse_unkeyed(name, layer)
            if isinstance(layer, Dropout):
                ours[layer] = layer
            elif type(layer).forward in [kind.forward for kind in _OF_CHANNELS]:
                ours[layer] = ChannelDropout(layer.p)
            elif type(layer).forward is nn.Dropout.forward:
                ours[layer] = Dropout(layer.p)
        for number, (layer, replacement) in enumerate(ours.items()):
            replacement.layer = number
            replacement.train(layer.training)
        if model in ours:
            return ours[model]
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is not None and child in ours:
                    setattr(parent, name, ours[child])
        if ours and count_anew not in model._forward_pre_hooks.values():
            model.register_forward_pre_hook(count_anew)
        return model


class ChannelDropout(Dropout):
    """`Dropout` of whole channels of `(batch, channels, ...)`, like nn.Dropout1d, 2d and 3d."""

    def _mask_shape(self, x: Tensor) -> torch.Size:
        if x.dim() < 2:
            raise ArgumentError(f"x: channel dropout takes (batch, channels, ...), got shape {tuple(x.shape)}")
        return torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)])


_OF_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_UNKEYED = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def count_anew(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Reset the use counts before a forward pass, so that every pass has the same masks."""
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.uses = 0


def _refuse_unkeyed(name: str, layer: nn.Module) -> None:
    if isinstance(layer, _UNKEYED):
        raise ArgumentError(
            f"model: layer {name!r} ({type(layer).__name__}) draws random numbers without a key; remove it"
        )
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0:
        raise ArgumentError(
            f"model: layer {name!r} ({type(layer).__name__}) has dropout inside, without a key; set its dropout to 0"
        )
