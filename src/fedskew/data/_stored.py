"""Inputs that are kept as stored and become floats batch by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
class Stored(Protocol):
    """Stands in for a tensor of inputs, `(samples, *in_shape)`, that would be too large.

    Reading is deterministic, and safe from several threads and in forked processes. Pickled, it names its files instead
    of carrying their content.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """`(samples, *in_shape)`."""

    @property
    def device(self) -> torch.device:
        """Device of the batches."""

    def __len__(self) -> int: ...

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Return the samples of these int64 rows, `(rows, *in_shape)`, on `device`, as a new tensor; `dim` is 0."""

    def to(self, device: torch.device | str, /) -> Stored:
        """Return the same samples with batches on another device."""


Inputs = Tensor | Stored
"""A data set's inputs. Training asks only for `shape`, `len`, `index_select(0, rows)`, `device` and `to(device)`."""


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """Select samples.

    Args:
        inputs: A tensor or stored inputs.

    Returns:
        A copy of a tensor's rows; for stored inputs, a view that lists the rows.
    """
    return inputs.index_select(0, rows.to(inputs.device)) if isinstance(inputs, Tensor) else Subset(inputs, rows)


class Subset:
    """A subset of the rows of stored inputs."""

    def __init__(self, inputs: Stored, rows: Tensor) -> None:
        self._inputs, self._rows = inputs, rows.to(inputs.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(rows, *in_shape)`."""
        return len(self._rows), *self._inputs.shape[1:]

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self._inputs.device

    def __len__(self) -> int:
        return len(self._rows)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        return self._inputs.index_select(dim, self._rows.index_select(0, index))

    def to(self, device: torch.device | str, /) -> Subset:
        """See `Stored.to`."""
        return Subset(self._inputs.to(device), self._rows)


class ByteImages:
    """Images of 8 bits per channel in memory, a quarter of the size of floats.

    A batch is scaled to [0, 1] and normalised by channel.

    Args:
        pixels: Images, `(samples, channels, height, width)` uint8.
        mean: Means by channel to normalise with.
        std: Deviations by channel to normalise with.
        device: Device of the batches; by default that of `pixels`.
    """

    def __init__(
        self, pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str | None = None
    ) -> None:
        self.pixels, self.mean, self.std = pixels, mean, std
        self._device = pixels.device if device is None else torch.device(device)
        self._shift, self._scale = (torch.tensor(values, device=self._device).view(-1, 1, 1) for values in (mean, std))

    @property
    def shape(self) -> tuple[int, ...]:
        """`(samples, channels, height, width)`."""
        return tuple(self.pixels.shape)

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self._device

    def __len__(self) -> int:
        return len(self.pixels)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        batch = self.pixels.index_select(dim, index.to(self.pixels.device)).to(self._device)
        return batch.float().div_(255).sub_(self._shift).div_(self._scale)

    def to(self, device: torch.device | str, /) -> ByteImages:
        """Return the images with their pixels moved to another device."""
        return ByteImages(self.pixels.to(device), self.mean, self.std)


class MappedImages(ByteImages):
    """`ByteImages` memory-mapped from a file."""

    def __init__(
        self, path: Path, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str = "cpu"
    ) -> None:
        # Copy-on-write: torch takes no read-only memory, and the file must not change.
        super().__init__(torch.from_numpy(np.load(path, mmap_mode="c")), mean, std, device)
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return MappedImages, (self.path, self.mean, self.std, self.device)

    def to(self, device: torch.device | str, /) -> ByteImages:
        """Return the images with batches on another device.

        On a GPU, the pixels themselves move if they take at most half of its free memory.
        """
        device = torch.device(device)
        if device.type == "cuda" and self.pixels.nbytes <= torch.cuda.mem_get_info(device)[0] // 2:
            return super().to(device)
        return MappedImages(self.path, self.mean, self.std, device)
