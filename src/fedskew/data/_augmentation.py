"""Random changes of training images: the protocol, CIFAR-10's crop and flip, FedEntOpt's colour jitter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import hardtanh_

from fedskew.errors import ArgumentError
from fedskew.parameters import Share, Size, component
from fedskew.randomness import uniform

_GREY = (0.299, 0.587, 0.114)

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""From a normalised batch, `(batch, channels, height, width)`, and int64 keys, `(batch,)`, to a new batch."""


class Augmenter(Protocol):
    """A random change of training images: a frozen dataclass of strengths.

    What happens to a sample is a function of its key alone, not of its position in the batch or of the other samples.
    No Python branch and no shape depends on values, so that it can be mapped over a cohort.
    """

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch, by one int64 key a sample.

        The batch, `(batch, channels, height, width)`, was normalised with these means and deviations by channel; they
        are empty if it was not.
        """


@component
class CropFlip:
    """Random horizontal flip and crop of the padded image: the usual augmentation of CIFAR-10.

    `pad` black pixels are added on each side, and the original size is cut, uniformly over the (2 pad + 1)^2 positions.
    """

    pad: Size = 4
    flip: Share = 0.5

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch."""
        check(batch, keys, "crop_flip")
        size, channels, height, width = batch.shape
        black = -per_channel(mean, batch, 0.0) / per_channel(std, batch, 1.0)
        draws = uniform(keys.unsqueeze(1), torch.arange(3, device=keys.device))
        down, right = (draws[:, 1:] * (2 * self.pad + 1)).long().unbind(1)
        unflipped = (draws[:, 0] >= self.flip).to(batch.dtype).view(-1, 1, 1, 1)

        tall, wide = height + 2 * self.pad, width + 2 * self.pad
        padded = batch.new_empty(size, channels, tall, wide).copy_(black)
        x = torch.lerp(batch.flip(-1), batch, unflipped)
        padded[..., self.pad : self.pad + height, self.pad : self.pad + width] = x
        # Every row of the result is `width` values in a row of memory. Picking such windows by where they start copies
        # rows; indexing by row and column would look up each pixel, and takes over twice the time.
        rows = torch.arange(size * channels, device=batch.device).view(size, channels, 1) * tall
        rows = rows + down.view(-1, 1, 1) + torch.arange(height, device=batch.device)
        starts = rows * wide + right.view(-1, 1, 1)
        windows = padded.flatten().unfold(0, width, 1)
        return windows.index_select(0, starts.flatten()).view(batch.shape)


@component
class JitterFlipGrey:
    """Colour jitter, horizontal flip and random greyscale (Lutz et al., "Boosting Federated Learning with FedEntOpt").

    Each strength s draws a factor f uniformly from [1 - s, 1 + s]; pixels in [0, 1] are clamped after each step.
    Brightness: f x; contrast: f x + (1 - f) m, m the image's mean grey; saturation: f x + (1 - f) grey(x), with
    grey = 0.299 R + 0.587 G + 0.114 B. On grey images saturation does nothing.

    The paper gives the probabilities of flip (0.5) and greyscale (0.1), and no strengths of the jitter. Chosen here:
    0.2 each for brightness, contrast and saturation, in this order, and no shift of hue (torchvision's default; its
    order is random).
    """

    brightness: Share = 0.2
    contrast: Share = 0.2
    saturation: Share = 0.2
    flip: Share = 0.5
    greyscale: Share = 0.1

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """Return the changed batch."""
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


def _grey(x: Tensor) -> Tensor:
    """Convert images to grey levels, `(batch, 1, ...)`."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    return (red * _GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])


def per_channel(values: Sequence[float], batch: Tensor, default: float) -> Tensor:
    """Return one value per channel, `(channels, 1, 1)`, filled on the device: a copy would make every step wait."""
    channels = batch.shape[-3]
    if values and len(values) != channels:
        raise ArgumentError(f"batch: has {channels} channels, but the data set was normalised with {len(values)}")
    own = values or [default] * channels
    return torch.stack([torch.full((1, 1), value, dtype=batch.dtype, device=batch.device) for value in own])


def check(batch: Tensor, keys: Tensor, name: str) -> None:
    """Raise ArgumentError where augmentation `name` can't take these shapes or dtypes."""
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not batch.is_floating_point():
        raise ArgumentError(
            f"batch: {name} takes images, (batch, 1 or 3, height, width), of floats; "
            f"got {tuple(batch.shape)} {batch.dtype}"
        )
    if keys.shape != batch.shape[:1]:
        raise ArgumentError(f"keys: expected one key per sample, ({batch.shape[0]},), got shape {tuple(keys.shape)}")
