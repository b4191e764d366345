"""What an augmentation implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""From a normalised batch, `(batch, channels, height, width)`, and int64 keys, `(batch,)`, to a new batch."""


class Augmenter(Protocol):
    """A frozen dataclass of strengths.

    What happens to a sample is a function of its key alone: of its place in the batch, or of the other samples, nothing
    depends. No Python branch on values and no shape that depends on them, so that it maps over a cohort.
    """

    def apply(self, batch: Tensor, keys: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        """The batch augmented; `mean` and `std` by channel are what it was normalised by (empty: not at all)."""

    def bind(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Augmentation:
        """`apply` for data normalised by these."""
