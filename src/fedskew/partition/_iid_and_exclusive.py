"""One group of clients with classes of their own, one group that shares the rest.

The partition of FedLA (Khalil et al., 2023), by the paper's text. Of K clients, floor(exclusive_share * K) hold
`labels_per_client` classes each that nobody else has, in equal parts; the others draw uniformly, without replacement,
from all samples of the classes that remain. Every client holds `samples_per_client`. The authors' code deals
consecutive classes from a random start instead, so that their clients overlap.

The exclusive clients come first; which classes they own is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition._checks import check_samples, check_whole
from fedskew.partition._deal import deal
from fedskew.partition._protocol import IntArray


@dataclass(frozen=True)
class IIDAndExclusive:
    """A share of the clients with exclusive labels, the others IID over the remaining ones; all of one size.

    `exclusive_share`: the paper's noniid_s; `labels_per_client`: its unique_c. `samples_per_client`: 2400 for EMNIST
    and 1000 for CIFAR-100 in the paper.
    """

    target_client: ClassVar[bool] = False

    exclusive_share: float
    labels_per_client: int
    samples_per_client: int

    def __post_init__(self) -> None:
        if not 0 <= self.exclusive_share <= 1:
            raise ArgumentError(f"exclusive_share: must be between 0 and 1, not {self.exclusive_share!r}")
        check_whole("labels_per_client", self.labels_per_client, 1)
        check_whole("samples_per_client", self.samples_per_client, 1)

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide `clients * samples_per_client` samples. See `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        exclusive = math.floor(self.exclusive_share * clients + 1e-9)
        taken = exclusive * self.labels_per_client
        if taken > classes or (taken == classes and exclusive < clients):
            raise PartitionError(
                f"{exclusive} clients with {self.labels_per_client} classes of their own each don't fit into {classes} "
                "classes with one left for the others: lower exclusive_share or labels_per_client"
            )
        order = rng.permutation(classes)
        counts = np.zeros((clients, classes), dtype=np.int64)
        part, rest = divmod(self.samples_per_client, self.labels_per_client)
        parts = part + (np.arange(self.labels_per_client) < rest)
        owned = order[:taken].reshape(exclusive, self.labels_per_client)
        np.put_along_axis(counts[:exclusive], owned, parts[None, :], axis=1)
        short = np.flatnonzero(counts.sum(axis=0) > class_sizes)
        if len(short):
            raise PartitionError(
                f"class {short[0]} has {class_sizes[short[0]]} samples and its owner needs "
                f"{counts[:, short[0]].sum()}: lower samples_per_client or raise labels_per_client"
            )

        shared = order[taken:]
        pool = np.repeat(shared, class_sizes[shared])
        needed = (clients - exclusive) * self.samples_per_client
        if needed > len(pool):
            raise PartitionError(
                f"the {len(shared)} classes that nobody owns have {len(pool)} samples and {clients - exclusive} "
                f"clients need {needed}: lower samples_per_client"
            )
        drawn = rng.permutation(pool)[:needed]
        client = np.repeat(np.arange(exclusive, clients), self.samples_per_client)
        counts += np.bincount(client * classes + drawn, minlength=clients * classes).reshape(clients, classes)
        return deal(labels, counts, rng)
