"""Inputs that are kept as stored and become floats batch by batch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
class Stored(Protocol):
    """Stands in for a tensor of inputs that would be too large; pickled, it names its files.

    Reading is deterministic, and safe from several threads and in forked processes.
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
    """Select samples by int64 row ids: a copy of a tensor's rows; of stored inputs, a view that lists the rows."""
    return inputs.index_select(0, rows.to(inputs.device)) if isinstance(inputs, Tensor) else Subset(inputs, rows)


class Subset:
    """A subset of the rows of stored inputs."""

    def __init__(self, inputs: Stored, rows: Tensor) -> None:
        self._inputs, self._rows = inputs, rows.to(inputs.device)
        self.device = inputs.device
        self.shape: tuple[int, ...] = (len(rows), *inputs.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        return self._inputs.index_select(dim, self._rows.index_select(0, index))

    def to(self, device: torch.device | str, /) -> Subset:
        """See `Stored.to`."""
        return Subset(self._inputs.to(device), self._rows)


class ByteImages:
    """Images in memory as bytes, `(samples, channels, height, width)` uint8, a quarter of the size of floats.

    A batch is scaled to [0, 1], normalised by channel and delivered on `device`, by default that of the images.
    """

    def __init__(
        self, pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str | None = None
    ) -> None:
        self.pixels, self.mean, self.std = pixels, mean, std
        self.device = pixels.device if device is None else torch.device(device)
        self.shape = tuple(pixels.shape)
        self._shift, self._scale = (torch.tensor(values, device=self.device).view(-1, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.pixels)

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """See `Stored.index_select`."""
        batch = self.pixels.index_select(dim, index.to(self.pixels.device)).to(self.device)
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
        """Deliver to another device; the images move to a GPU if they take half of its free memory at most."""
        device = torch.device(device)
        if device.type == "cuda" and self.pixels.nbytes <= torch.cuda.mem_get_info(device)[0] // 2:
            return super().to(device)
        return MappedImages(self.path, self.mean, self.std, device)
