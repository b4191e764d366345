"""Dropout whose mask is a function of a key, so that a step gives the same result on any device and in any backend."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError
from fedskew.models._winograd import has_kernels
from fedskew.randomness import hashed, is_on_cpu, uniform


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
        return x * self.mask(x)

    def mask(self, x: Tensor) -> Tensor:
        """Return what each element of `x`, or each channel, is multiplied by in training."""
        shape, layer, use = self._mask_shape(x), self.layer, self.uses
        factor = 1.0 / (1.0 - self.p) if self.p < 1 else 0.0
        self.uses += 1
        if x.dtype == torch.float32 and is_on_cpu((x, self.key)) and has_kernels():
            from fedskew.models._kernels import draw_mask

            mask, value = np.empty(shape, np.float32), hashed(layer, use, int(self.key))
            draw_mask(mask.reshape(-1), np.uint32(value), np.float32(self.p), np.float32(factor))
            return torch.from_numpy(mask)
        places = torch.arange(shape.numel(), device=x.device).view(shape)
        kept = (uniform(layer, use, self.key, places) >= self.p).to(torch.float32)
        return (kept * factor).to(x.dtype)

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
    def swap(model: nn.Module, samples: Tensor | None = None) -> nn.Module:
        """Replace a model's nn.Dropout, 1d, 2d and 3d layers by keyed ones, in place, and number all dropout layers.

        Where a model then still draws from PyTorch's global generator in training, as by `functional.dropout`, that is
        seeded by a key around each pass, and left as it was. It is known of PyTorch's layers, and of others if a pass
        of some `samples` does so.

        Returns:
            The model, or its replacement if it is a dropout layer itself.
        """
        ours: dict[nn.Module, Dropout] = {}
        for layer in model.modules():
            p: Any = getattr(layer, "p", 0.0)
            if isinstance(layer, Dropout):
                ours[layer] = layer
            elif type(layer).forward in [kind.forward for kind in _OF_CHANNELS]:
                ours[layer] = ChannelDropout(p)
            elif type(layer).forward is nn.Dropout.forward:
                ours[layer] = Dropout(p)
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
        is_seeded = any(isinstance(layer, Draws) for layer in model.modules())
        if not is_seeded and (
            any(map(_draws, model.modules())) or (samples is not None and _is_drawing(model, samples))
        ):
            model.add_module(_DRAWS, Draws(len(ours)))
            model.register_forward_pre_hook(_seed)
            model.register_forward_hook(_restore, always_call=True)
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


class Draws(Dropout):
    """The key of what a network draws from PyTorch's global generator in a pass in training."""

    def __init__(self, layer: int) -> None:
        super().__init__(0.0)
        self.layer = layer
        self.around: Any = None


_DRAWS = "fedskew_draws"


def _seed(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Seed PyTorch's global generator by the key of a step, before a pass in training."""
    if model.training:
        draws: Any = model.get_submodule(_DRAWS)
        draws.around = torch.random.fork_rng([draws.key.device] if draws.key.is_cuda else [])
        draws.around.__enter__()
        torch.manual_seed(int(draws.key))


def _restore(model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
    """Leave PyTorch's global generator as it was before the pass."""
    draws: Any = model.get_submodule(_DRAWS)
    around, draws.around = draws.around, None
    if around is not None:
        around.__exit__(None, None, None)


def _draws(layer: nn.Module) -> bool:
    """Return whether a layer of PyTorch's draws from the global generator in training."""
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, _UNKEYED)


def _is_drawing(model: nn.Module, samples: Tensor) -> bool:
    """Return whether a pass of some samples, in training, draws from PyTorch's global generator."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        try:
            with torch.no_grad():
                copy.deepcopy(model).train()(samples)
        except Exception:  # such as batch norm with too few values: training will say what
            return False
        return not torch.equal(before, torch.get_rng_state())
