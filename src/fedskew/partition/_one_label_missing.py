"""FedPALS's rule for PACS: every client lacks a different label, and one client is small."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from fedskew.errors import PartitionError
from fedskew.parameters import component
from fedskew.partition._rule import IntArray, check_samples, deal


@component
class OneLabelMissing:
    """Each of K clients lacks one of the first K labels, and the first client is small.

    The split of PACS in FedPALS, as in its authors' code (Breitholtz/FedDG_Benchmark, "ImbalancedSplitter"). Client i
    of K lacks label K - 1 - i; the samples of each of the first K labels are shared evenly by the other K - 1 clients;
    all others are pooled, shuffled and dealt in K equal parts; then the first client keeps a tenth of what it has. On
    the 5,683 training images of sketch and cartoon that makes 191, 1874 and 1891 samples. The paper's text reads as if
    all samples were dealt in thirds first, which would make 156, 1533 and 1544. (The code's first two parts are 33 %.)

    Attributes:
        kept: Share of its samples that the first client keeps.
    """

    target_client: ClassVar[bool] = False

    kept: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.1

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples except those that the first client loses; see `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        if not 2 <= clients <= classes:
            raise PartitionError(
                f"with {classes} labels, {clients} clients can't lack one each: take at least 2 and at most {classes}"
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
