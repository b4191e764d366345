"""Every class is cut into equal shards, and every client is dealt the same number of them.

The sharding of FedNTD (Lee et al., 2022). With K clients, C classes and s shards a client, each class is cut into
s * K / C shards, which must be a whole number; all shards are shuffled and dealt. A client may be dealt one label
twice, so it holds at most s labels.
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
class Shards:
    """`per_client` shards for each client; shards of a class differ by one sample at most."""

    target_client: ClassVar[bool] = False

    per_client: int

    def __post_init__(self) -> None:
        check_whole("per_client", self.per_client, 1)

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples. See `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        per_class, rest = divmod(self.per_client * clients, classes)
        if rest or not per_class:
            raise PartitionError(
                f"{clients} clients with {self.per_client} shards each can't share {classes} classes equally: "
                f"choose per_client or clients so that their product is a multiple of {classes}"
            )
        part, rest_of_class = np.divmod(class_sizes, per_class)
        shard_sizes = part[:, None] + (np.arange(per_class) < rest_of_class[:, None])
        shards = rng.permutation(classes * per_class).reshape(clients, self.per_client)
        counts = np.zeros((clients, classes), dtype=np.int64)
        np.add.at(counts, (np.arange(clients)[:, None], shards // per_class), shard_sizes.ravel()[shards])
        return deal(labels, counts, rng)
