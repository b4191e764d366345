"""The one partition that a paper prints whole: CIFAR-10 among ten clients, FedVLS's table 7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import PartitionError
from fedskew.papers._published import printed_counts


@dataclass(frozen=True)
class PrintedCounts:
    """As many samples of each class as the table prints for each client; which ones is drawn."""

    target_client: ClassVar[bool] = False

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[NDArray[np.int64]]:
        """Divide the samples. See `fedskew.partition.Rule`. Raises PartitionError where the table doesn't fit."""
        counts, labels = printed_counts(), np.asarray(labels)
        held = np.bincount(labels, minlength=num_classes or 0)
        if clients != len(counts) or len(held) != counts.shape[1] or (held < counts.sum(axis=0)).any():
            raise PartitionError(
                f"the printed table is for {len(counts)} clients and {counts.shape[1]} classes of "
                f"{counts.sum(axis=0).max()} samples each, as CIFAR-10 has"
            )
        shares: list[list[NDArray[np.int64]]] = [[] for _ in counts]
        for label in range(counts.shape[1]):
            rows = rng.permutation(np.flatnonzero(labels == label))
            for client, part in enumerate(np.split(rows, np.cumsum(counts[:, label]))[:-1]):
                shares[client].append(part)
        return [np.sort(np.concatenate(parts)) for parts in shares]
