"""FedEntOpt: Lutz, Steidl, Mueller, Samek, "Boosting Federated Learning with FedEntOpt", Algorithm 1.

The first client is drawn uniformly; each next one is the client l that maximises the entropy of the cohort's summed
label counts L, H((L + l) / |L + l|), in bits. Raw counts are summed, so that large clients weigh more. Whoever took
part stays out while a first-in first-out buffer of Q clients, which persists from round to round, remembers it.

Read literally: those who may be chosen are set anew each round and only become fewer within it, so that a client that
the buffer drops during a round may be chosen in the next one. The paper leaves open what happens with Q = 0 (here: no
memory), when Q and the cohort together exceed the clients (refused), on ties (lowest id within 1e-12 bits), and with an
empty pool (entropy 0). The paper tries Q of 50 to 80 % of the clients and finds 50 % best for Dirichlet splits, 70 %
for a fixed number of labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.about import LABEL_COUNTS, Cost
from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.selection._checks import check_rng, check_round
from fedskew.selection._evenness import even_cohort
from fedskew.selection._protocol import IntArray


@dataclass(frozen=True)
class FedEntOptState:
    """`buffer`: ids of the clients that stay out, oldest first."""

    buffer: IntArray


@dataclass(frozen=True)
class FedEntOpt:
    """Greedy maximisation of the cohort's label entropy. `buffer`: Q as a share of the clients, rounded down."""

    paper: ClassVar[str] = "Lutz et al., arXiv 2411.01240"
    cost: ClassVar[Cost] = LABEL_COUNTS

    buffer: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.buffer < 1:
            raise ArgumentError(f"buffer: must be a share of the clients, from 0 to below 1, not {self.buffer!r}")

    def init(self, counts: CountsLike) -> FedEntOptState:
        """An empty buffer."""
        as_counts(counts)
        return FedEntOptState(np.empty(0, dtype=np.int64))

    def select(
        self,
        state: FedEntOptState,
        counts: CountsLike,
        size: int,
        rng: np.random.Generator,
        first: int | None = None,
    ) -> tuple[IntArray, FedEntOptState]:
        """See `Selection.select`. Raises `ArgumentError` where the buffer leaves fewer than `size` clients."""
        counts = as_counts(counts)
        clients = len(counts)
        check_round(clients, size, first)
        check_rng(rng)
        capacity = math.floor(self.buffer * clients + 1e-9)
        if capacity + size > clients:
            raise ArgumentError(
                f"buffer: {self.buffer:g} keeps {capacity} of {clients} clients out, which leaves fewer than the "
                f"cohort of {size}; the largest that works is {(clients - size) / clients:.12g}"
            )
        if first in state.buffer:
            raise ArgumentError(f"first: client {first} is in the buffer, so it can't be chosen this round")
        candidates = np.delete(np.arange(clients), state.buffer)
        cohort = even_cohort(counts, candidates, size, rng.choice(candidates) if first is None else first)
        remembered = np.concatenate([state.buffer, cohort])
        return cohort, FedEntOptState(remembered[max(0, len(remembered) - capacity) :])
