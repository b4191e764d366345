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
from torch.nn.functional import hardtanh_

from fedskew.data._pixels import check, per_channel
from fedskew.data._protocol import Augmentation
from fedskew.errors import ArgumentError
from fedskew.randomness import uniform

_GREY = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class JitterFlipGrey:
    """Each strength s draws a factor f uniformly from [1 - s, 1 + s]; pixels in [0, 1], clamped after each step.

    Brightness: f x; contrast: f x + (1 - f) m, m the picture's mean grey; saturation: f x + (1 - f) grey(x), with
    grey = 0.299 R + 0.587 G + 0.114 B. With probability `greyscale` the saturation is 0 instead, which is the grey
    picture in all channels. Mirrored left to right with probability `flip`. On grey pictures saturation does nothing.
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
        unflipped = (draws[:, 0] >= self.flip).to(batch.dtype).view(-1, 1, 1, 1)
        brightness, contrast, saturation = (
            1 + strength * (2 * draw.view(-1, 1, 1, 1) - 1)
            for strength, draw in zip(
                (self.brightness, self.contrast, self.saturation), draws[:, 1:4].unbind(1), strict=True
            )
        )
        saturation = saturation * (draws[:, 4] >= self.greyscale).view(-1, 1, 1, 1)

        # In place from here on: allocating each step's result anew would take twice the time.
        x = torch.lerp(batch.flip(-1), batch, unflipped)
        x.mul_(scale).add_(shift)
        hardtanh_(x.mul_(brightness), 0, 1)  # clamps; clamp_ itself has no batching rule
        grey = _grey(x.mean((-2, -1), keepdim=True))
        hardtanh_(x.mul_(contrast).add_(grey * (1 - contrast)), 0, 1)
        if batch.shape[1] == 3:
            grey = _grey(x)
            hardtanh_(x.mul_(saturation).add_(grey.mul_(1 - saturation)), 0, 1)
        return x.sub_(shift).div_(scale)

    def bind(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Augmentation:
        """`apply` for data normalised by these."""
        return functools.partial(self.apply, mean=mean, std=std)


def _grey(x: Tensor) -> Tensor:
    """`(batch, 1, ...)`."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
