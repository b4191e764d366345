"""The rule without skew: every client gets a random part of all samples."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.parameters import component
from fedskew.partition._rule import IntArray, apportion, check_samples, deal


@component
class IID:
    """Samples are dealt at random, in parts of one size: every client's label mix is that of all, up to chance.

    This is what the papers call IID: the yardstick for what label skew costs. Sizes differ by one at most.
    """

    target_client: ClassVar[bool] = False

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples; see `Rule.split`."""
        labels, _ = check_samples(labels, clients, rng, num_classes)
        if len(labels) < clients:
            raise PartitionError(f"{len(labels)} samples can't be divided among {clients} clients: lower clients")
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def stratified(labels: ArrayLike, size: int, rng: np.random.Generator) -> IntArray:
    """Draw some of the samples, each class by its share of all.

    Args:
        labels: Class ids, shape `(samples,)`, integers.
        size: Number of samples to draw.
        rng: Source of all random draws.

    Returns:
        An ascending array of indices into `labels`. No class has more than its share rounded up, nor less than rounded
        down.

    Raises:
        ArgumentError: There are not so many samples.
    """
    array, class_sizes = check_samples(labels, 1, rng, None)
    if not 1 <= size <= len(array):
        raise ArgumentError(f"rows: must be from 1 to the number of samples, {len(array)}, not {size}")
    return deal(array, apportion(np.array([size]), class_sizes[None]), rng)[0]
