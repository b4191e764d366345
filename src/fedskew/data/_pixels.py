"""Between normalised values and pixels in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedskew.errors import ArgumentError


def per_channel(values: Sequence[float], batch: Tensor, default: float) -> Tensor:
    """One value a channel as a `(channels, 1, 1)` tensor beside `batch`; `default` for all where `values` is empty."""
    channels = batch.shape[-3]
    if values and len(values) != channels:
        raise ArgumentError(f"batch: has {channels} channels, but the data set was normalised with {len(values)}")
    return torch.tensor(list(values) or [default] * channels, dtype=batch.dtype, device=batch.device).view(-1, 1, 1)


def check(batch: Tensor, keys: Tensor, name: str) -> None:
    """Raises ArgumentError where augmentation `name` can't take these shapes or dtypes."""
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not batch.is_floating_point():
        raise ArgumentError(
            f"batch: {name} takes pictures, (batch, 1 or 3, height, width), of floats; "
            f"got {tuple(batch.shape)} {batch.dtype}"
        )
    if keys.shape != batch.shape[:1]:
        raise ArgumentError(f"keys: expected one key a sample, ({batch.shape[0]},), got shape {tuple(keys.shape)}")
