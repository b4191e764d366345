"""Clients in pairs: both of a pair hold the same classes, nobody else does, and the parts are unequal.

The "s" partition of FedVLS, read in its authors' code (the paper cites FedNTD, whose rule is another: `Shards`). Class
after class goes to the first two clients that may still take one, so that clients 2p and 2p + 1 share the same
`classes_per_client` classes. Of each class with n samples the first gets a whole number drawn uniformly from
[low * n, high * n), the second the rest. The authors take low 1/20, high 1/2, but high 1 for CIFAR-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition._checks import check_samples, check_whole
from fedskew.partition._deal import deal
from fedskew.partition._protocol import IntArray


@dataclass(frozen=True)
class PairedShards:
    """Pairs of clients that share `classes_per_client` classes exclusively and unequally."""

    target_client: ClassVar[bool] = False

    classes_per_client: int
    low: float = 1 / 20
    high: float = 1 / 2

    def __post_init__(self) -> None:
        check_whole("classes_per_client", self.classes_per_client, 1)
        if not 0 <= self.low < self.high <= 1:
            raise ArgumentError(f"low, high: must satisfy 0 <= low < high <= 1, not {self.low!r} and {self.high!r}")

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples. See `Rule.split`; refuses where a client or a class would be left over."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        pairs = -(-classes // self.classes_per_client)
        if clients != 2 * pairs:
            raise PartitionError(
                f"{classes} classes at {self.classes_per_client} a client occupy {pairs} pairs, not {clients} clients: "
                f"take {2 * pairs} clients, or another classes_per_client"
            )
        least = np.floor(self.low * class_sizes + 1e-9).astype(np.int64)
        end = np.floor(self.high * class_sizes + 1e-9).astype(np.int64)
        # Where the class is too small for the interval to hold a whole number, its lower end.
        first = rng.integers(least, np.maximum(end, least + 1))
        pair = np.arange(classes) // self.classes_per_client
        counts = np.zeros((clients, classes), dtype=np.int64)
        counts[2 * pair, np.arange(classes)] = first
        counts[2 * pair + 1, np.arange(classes)] = class_sizes - first
        return deal(labels, counts, rng)
