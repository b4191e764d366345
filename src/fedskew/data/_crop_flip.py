"""Random crop of the padded picture, and horizontal flip: the usual augmentation of CIFAR-10."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fedskew.data._pixels import check, per_channel
from fedskew.data._protocol import Augmentation
from fedskew.errors import ArgumentError
from fedskew.randomness import uniform


@dataclass(frozen=True)
class CropFlip:
    """Mirrors left to right with probability `flip`, pads `pad` black pixels on each side, and cuts the original size.

    Where it cuts is uniform over the (2 pad + 1)^2 places.
    """

    pad: int = 4
    flip: float = 0.5

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ArgumentError(f"pad: must not be negative, got {self.pad}")
        if not 0.0 <= self.flip <= 1.0:
            raise ArgumentError(f"flip: must be in [0, 1], got {self.flip}")

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """The batch augmented; `mean` and `std` by channel are what it was normalised by (empty: not at all)."""
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

    def bind(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Augmentation:
        """`apply` for data normalised by these."""
        return functools.partial(self.apply, mean=mean, std=std)
