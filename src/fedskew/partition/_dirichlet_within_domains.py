"""Each domain of the data set is divided among clients of its own, class by class, by a Dirichlet draw.

The split of Digits in FedVLS (tables 14 and 15: "each domain among six clients"). With D domains and K clients, domain
d goes to clients d K/D to (d + 1) K/D - 1, by `DirichletByClass`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError, PartitionError
from fedskew.partition._dirichlet_by_class import DirichletByClass
from fedskew.partition._protocol import IntArray


@dataclass(frozen=True)
class DirichletWithinDomains:
    """Dir(beta) over the clients of one domain, class by class. Parameters as of `DirichletByClass`."""

    target_client: ClassVar[bool] = False

    beta: float
    min_size: int = 10
    balance: bool = True
    max_tries: int = 10_000

    def __post_init__(self) -> None:
        self._rule()

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Raise `PartitionError`: labels alone don't say where a sample comes from."""
        raise PartitionError("the data set has no domains: choose another partition rule")

    def split_domains(
        self,
        labels: ArrayLike,
        domains: ArrayLike,
        clients: int,
        rng: np.random.Generator,
        num_classes: int | None = None,
    ) -> list[IntArray]:
        """Divide all samples. See `DomainRule.split_domains`."""
        labels, domains = np.asarray(labels), np.asarray(domains)
        if domains.shape != labels.shape or domains.dtype.kind not in "iu":
            raise ArgumentError(
                f"domains: must be one integer a sample, ({len(labels)},); got {domains.shape} {domains.dtype}"
            )
        found = np.unique(domains)
        each, rest = divmod(clients, len(found))
        if rest or not each:
            raise PartitionError(
                f"{clients} clients can't be divided evenly among {len(found)} domains: take a multiple of {len(found)}"
            )
        shares = []
        for domain in found:
            rows = np.flatnonzero(domains == domain)
            try:
                shares += [rows[own] for own in self._rule().split(labels[rows], each, rng, num_classes)]
            except PartitionError as error:
                raise PartitionError(f"in domain {domain}: {error}") from None
        return shares

    def _rule(self) -> DirichletByClass:
        return DirichletByClass(self.beta, self.min_size, self.balance, self.max_tries)
