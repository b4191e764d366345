"""Colour jitter, horizontal flip and random greyscale (Lutz et al., "Boosting Federated Learning with FedEntOpt").

The paper gives the probabilities of flip (0.5) and greyscale (0.1), and no strengths of the jitter. Chosen here: 0.2
each for brightness, contrast and saturation, in this order, and no shift of hue (torchvision's default; its order is
random).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.data._pixels import check, per_channel
from fedskew.data._protocol import Augmentation
from fedskew.errors import ArgumentError
from fedskew.randomness import uniform

_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class JitterFlipGrey:
    """Each strength s draws a factor f uniformly from [1 - s, 1 + s], on pixels in [0, 1], clamped after each step.

    brightness: f x; contrast: f x + (1 - f) m, m the picture's mean grey; saturation: f x + (1 - f) grey(x), with
    grey = 0.299 R + 0.587 G + 0.114 B. Then grey in all channels with probability `greyscale`. Mirrored left to right
    with probability `flip`. On grey pictures saturation and greyscale do nothing.
    """

    brightness: float = 0.2
    contrast: float = 0.2
    saturation: float = 0.2
    flip: float = 0.5
    greyscale: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value <= 1.0:
                raise ArgumentError(f"{name}: must be in [0, 1], got {value}")

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """The batch augmented; `mean` and `std` by channel are what it was normalised by (empty: not at all)."""
        check(batch, keys, "fedentopt")
        shift, scale = per_channel(mean, batch, 0.0), per_channel(std, batch, 1.0)
        draws = uniform(keys.unsqueeze(1), torch.arange(5, device=keys.device)).to(batch.dtype)
        flips, greys, *factors = draws.view(-1, 5, 1, 1, 1).unbind(1)
        strengths = (self.brightness, self.contrast, self.saturation)
        bright, contrast, saturation = (1 + s * (2 * u - 1) for s, u in zip(strengths, factors, strict=True))

        # In place from here on: allocating each step's result anew would take twice the time.
        x = torch.lerp(batch, batch.flip(-1), (flips < self.flip).to(batch.dtype))
        x.mul_(scale).add_(shift)
        x.mul_(bright).clamp_(0, 1)
        x.mul_(contrast).add_((1 - contrast) * _grey(x).mean((-2, -1), keepdim=True)).clamp_(0, 1)
        if batch.shape[1] == 3:
            x.mul_(saturation).add_((1 - saturation) * _grey(x)).clamp_(0, 1)
            x.lerp_(_grey(x), (greys < self.greyscale).to(batch.dtype))
        return x.sub_(shift).div_(scale)

    def bind(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Augmentation:
        """`apply` for data normalised by these."""
        return functools.partial(self.apply, mean=mean, std=std)


def _grey(x: Tensor) -> Tensor:
    """`(batch, 1, height, width)`."""
    if x.shape[1] == 1:
        return x.clone()
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
