"""Every client holds a fixed number of labels.

The `#C = k` of NIID-Bench and FedEntOpt. Client i gets label i mod C and k - 1 distinct others at random; the samples
of a class are divided evenly among its holders, the first of them getting one more where it does not come out even.
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
class Quantity:
    """`labels_per_client` labels for each client; every class shared evenly by its holders."""

    target_client: ClassVar[bool] = False

    labels_per_client: int

    def __post_init__(self) -> None:
        check_whole("labels_per_client", self.labels_per_client, 1)

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples. See `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        if self.labels_per_client > classes:
            raise PartitionError(
                f"{self.labels_per_client} of {classes} classes can't be held: lower labels_per_client"
            )
        if clients < classes and self.labels_per_client < classes:
            raise PartitionError(
                f"{clients} clients leave some of {classes} classes without a holder: take at least {classes} clients, "
                f"or labels_per_client = {classes}"
            )
        # A random order of the classes for each client, its own label first.
        order = rng.random((clients, classes))
        order[np.arange(clients), np.arange(clients) % classes] = -1.0
        held = np.argpartition(order, self.labels_per_client - 1, axis=1)[:, : self.labels_per_client]
        holds = np.zeros((clients, classes), dtype=np.int64)
        np.put_along_axis(holds, held, 1, axis=1)

        part, rest = np.divmod(class_sizes, holds.sum(axis=0))
        place = np.cumsum(holds, axis=0)  # of a holder among the holders of its class, from 1
        return deal(labels, holds * (part + (place <= rest)), rng)
