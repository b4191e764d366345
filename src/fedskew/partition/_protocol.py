"""What a partition rule implements."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


class Rule(Protocol):
    """One way to divide a labelled data set among clients: a frozen dataclass of parameters."""

    @property
    def target_client(self) -> bool:
        """Whether the last of the clients is the target: its label mix is what the others train for."""

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """The samples of each client: `clients` disjoint arrays of indices into `labels`, each ascending.

        `labels`: `(samples,)` integers in [0, num_classes); without `num_classes`, up to the largest that occurs.
        The result depends on these arguments and the state of `rng` only. Raises `ArgumentError` for a bad argument,
        `PartitionError` where the rule can't divide these labels among so many clients.
        """


@runtime_checkable
class DomainRule(Protocol):
    """A rule that also asks where each sample comes from; its `split` alone raises `PartitionError`."""

    def split_domains(
        self,
        labels: ArrayLike,
        domains: ArrayLike,
        clients: int,
        rng: np.random.Generator,
        num_classes: int | None = None,
    ) -> list[IntArray]:
        """As `Rule.split`; `domains`: `(samples,)` integers, the domain of each sample."""
