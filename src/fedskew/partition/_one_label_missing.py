"""Every client lacks one label of its own, and one client is small.

The split of PACS in FedPALS, as in its authors' code (Breitholtz/FedDG_Benchmark, "ImbalancedSplitter"). Client i of K
lacks label K - 1 - i; the samples of each of the first K labels are shared evenly by the other K - 1 clients; all
others are pooled, shuffled and dealt in K equal parts; then the first client keeps a tenth of what it has. On the 5,683
training pictures of sketch and cartoon that makes 191, 1874 and 1891 samples. The paper's text reads as if all samples
were dealt in thirds first, which would make 156, 1533 and 1544. (The code's first two parts are 33 %.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition._checks import check_samples
from fedskew.partition._deal import deal
from fedskew.partition._protocol import IntArray


@dataclass(frozen=True)
class OneLabelMissing:
    """Each of K clients lacks one of the first K labels, from the last to the first; `kept`: of the first's samples."""

    target_client: ClassVar[bool] = False

    kept: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ArgumentError(f"kept: must be above 0 and at most 1, not {self.kept!r}")

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples but those that the first client loses. See `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        if not 2 <= clients <= classes:
            raise PartitionError(
                f"{clients} clients can't lack one of {classes} labels each: take at least 2 and at most {classes}"
            )
        counts = np.zeros((clients, classes), dtype=np.int64)
        for label in range(clients):
            holders = np.delete(np.arange(clients), clients - 1 - label)
            part, rest = divmod(int(class_sizes[label]), clients - 1)
            counts[holders, label] = part + (np.arange(clients - 1) < rest)
        pool = rng.permutation(np.repeat(np.arange(clients, classes), class_sizes[clients:]))
        for client, dealt in enumerate(np.array_split(pool, clients)):
            counts[client] += np.bincount(dealt, minlength=classes)
        keeps = math.floor(self.kept * counts[0].sum() + 1e-9)
        counts[0] = rng.multivariate_hypergeometric(counts[0], keeps)
        return deal(labels, counts, rng)
