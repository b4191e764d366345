"""Every client, and the target, holds a few random labels in equal numbers.

The `C = k` split of FedPALS. Each client draws k distinct labels; the last client is the target. Every client gets the
same number of samples of each of its labels, and no sample goes to two clients. The paper gives no number; here it is
the largest that works: the minimum over the labels in use of floor(samples of the label / holders of the label).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import PartitionError
from fedskew.partition._checks import check_samples, check_whole
from fedskew.partition._deal import deal
from fedskew.partition._protocol import IntArray


@dataclass(frozen=True)
class Sparsity:
    """`labels_per_client` random labels for each client, uniform over them; the last client is the target."""

    target_client: ClassVar[bool] = True

    labels_per_client: int

    def __post_init__(self) -> None:
        check_whole("labels_per_client", self.labels_per_client, 1)

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide as many samples as can be had in equal numbers. See `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        if clients < 2:
            raise PartitionError("the last client is the target, so one client leaves nobody to train: take 2 or more")
        if self.labels_per_client > classes:
            raise PartitionError(
                f"{self.labels_per_client} of {classes} classes can't be held: lower labels_per_client"
            )
        held = np.argsort(rng.random((clients, classes)), axis=1)[:, : self.labels_per_client]
        holds = np.zeros((clients, classes), dtype=np.int64)
        np.put_along_axis(holds, held, 1, axis=1)
        holders = holds.sum(axis=0)
        used = np.flatnonzero(holders)
        quota = class_sizes[used] // holders[used]
        scarce = used[np.argmin(quota)]
        if quota.min() == 0:
            raise PartitionError(
                f"class {scarce} has {class_sizes[scarce]} samples for {holders[scarce]} holders: lower clients or "
                "labels_per_client"
            )
        return deal(labels, holds * quota.min(), rng)
