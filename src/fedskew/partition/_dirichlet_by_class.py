"""Every class is divided among the clients by a Dirichlet draw.

Li et al., "Federated Learning on Non-IID Data Silos" (NIID-Bench); the `Dir(beta)` of FedEntOpt and FedVLS. For each
class in turn, shares p ~ Dir(beta, ..., beta) over the clients; with the balance rule, the share of every client that
already holds its fair part (all samples / clients) or more is set to 0, and the others are normalised; the n samples of
the class are cut at floor(cumsum(p) * n) and the last client gets the rest. All is drawn again until every client holds
`min_size` samples.

The authors' code loops until that happens, which may be never, and divides by zero where all remaining shares are 0;
here the tries are bounded and such a class is drawn again. (CIFAR-10, beta 0.1, 10 samples: about one draw in 4 will do
for 100 clients, in 30 for 150, in 300 for 200.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition._checks import check_positive, check_samples, check_whole
from fedskew.partition._deal import deal
from fedskew.partition._protocol import IntArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class DirichletByClass:
    """Dir(beta) over clients, class by class: label mixes and sizes both vary.

    `beta`: the concentration; small is skewed. `min_size`: samples that every client must hold; take 1 for 150 or more
    clients at beta 0.1. `balance`: the balance rule; the papers' figures are with it. `max_tries`: draws before it
    gives up.
    """

    target_client: ClassVar[bool] = False

    beta: float
    min_size: int = 10
    balance: bool = True
    max_tries: int = 10_000

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_whole("min_size", self.min_size, 0)
        check_whole("max_tries", self.max_tries, 1)
        if not isinstance(self.balance, bool):
            raise ArgumentError(f"balance: must be true or false, not {self.balance!r}")

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples. See `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        if len(labels) < clients * self.min_size:
            raise PartitionError(
                f"{len(labels)} samples can't give {self.min_size} to each of {clients} clients: lower min_size"
            )
        best = 0
        for _ in range(self.max_tries):
            counts = self._draw_counts(class_sizes, clients, rng)
            smallest = int(counts.sum(axis=1).min())
            if smallest >= self.min_size:
                return deal(labels, counts, rng)
            best = max(best, smallest)
        raise PartitionError(
            f"none of {self.max_tries} draws gave {self.min_size} samples to each of {clients} clients (the best gave "
            f"{best}): lower min_size or clients, or raise beta or max_tries"
        )

    def _draw_counts(self, class_sizes: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        """One try: samples per client and class, without yet saying which."""
        fair = class_sizes.sum() / clients
        held = np.zeros(clients, dtype=np.int64)
        counts = np.zeros((clients, len(class_sizes)), dtype=np.int64)
        draws = rng.dirichlet(np.full(clients, self.beta), size=len(class_sizes))
        for label, size in enumerate(class_sizes):
            if size == 0:
                continue
            share = self._open_shares(draws[label], held < fair, rng)
            cuts = (np.cumsum(share) * size).astype(np.int64)
            cuts[-1] = size
            counts[0, label] = cuts[0]
            counts[1:, label] = cuts[1:] - cuts[:-1]
            held += counts[:, label]
        return counts

    def _open_shares(self, share: FloatArray, below_fair: NDArray[np.bool_], rng: np.random.Generator) -> FloatArray:
        """The shares after the balance rule, sum 1; drawn again where nothing is left of them.

        Someone is below the fair part as long as a sample is left; the shares of all such clients may underflow to 0.
        """
        for _ in range(self.max_tries):
            kept: FloatArray = share * below_fair if self.balance else share
            total = float(kept.sum())
            if total > 0:
                return kept / total
            share = rng.dirichlet(np.full(len(share), self.beta))
        raise PartitionError(
            f"none of {self.max_tries} draws of a class left a share to a client below its fair part: raise beta, or "
            "set balance to false"
        )
