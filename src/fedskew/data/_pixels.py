"""Between normalised values, pixels in [0, 1], and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedskew.errors import ArgumentError


def per_channel(values: Sequence[float], batch: Tensor, default: float) -> Tensor:
    """One value a channel as a `(channels, 1, 1)` tensor beside `batch`; `default` for all where `values` is empty.

    Filled where it lies: what is copied there from the host would have to be waited for, in every step.
    """
    channels = batch.shape[-3]
    if values and len(values) != channels:
        raise ArgumentError(f"batch: has {channels} channels, but the data set was normalised with {len(values)}")
    own = values or [default] * channels
    return torch.stack([torch.full((1, 1), value, dtype=batch.dtype, device=batch.device) for value in own])


def check(batch: Tensor, keys: Tensor, name: str) -> None:
    """Raises ArgumentError where augmentation `name` can't take these shapes or dtypes."""
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not batch.is_floating_point():
        raise ArgumentError(
            f"batch: {name} takes pictures, (batch, 1 or 3, height, width), of floats; "
            f"got {tuple(batch.shape)} {batch.dtype}"
        )
    if keys.shape != batch.shape[:1]:
        raise ArgumentError(f"keys: expected one key a sample, ({batch.shape[0]},), got shape {tuple(keys.shape)}")


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 pictures, `(samples, channels, height, width)`, as floats: scaled to [0, 1], then by channel."""
    shift, scale = (torch.tensor(list(values)).view(-1, 1, 1) for values in (mean, std))
    return pixels.float().div_(255).sub_(shift).div_(scale)


def statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation by channel of uint8 pictures scaled to [0, 1]: exact, from how often each level occurs."""
    levels, means, deviations = np.arange(256) / 255, [], []
    for channel in range(pixels.shape[1]):
        shares = np.zeros(256)
        for part in torch.split(pixels[:, channel], 10_000):
            shares += np.bincount(part.numpy().ravel(), minlength=256)
        shares /= shares.sum()
        means.append(float(shares @ levels))
        deviations.append(float(np.sqrt(shares @ (levels - means[-1]) ** 2)) or 1.0)
    return tuple(means), tuple(deviations)
