"""What goes wrong in a real federation: clients that vanish after they were chosen, and clients that do less."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedskew.randomness import Purpose, generator


@dataclass(frozen=True)
class Conditions:
    """Conditions of FedEntOpt's table III.

    `dropout`: share of every cohort that is lost after selection (there: 0.3). With rule "exact", floor(share * cohort)
    of them at random, and never all; with "bernoulli" each by its own coin, so that a round may have nobody.
    `stragglers`: share of the pool (there: 0.5) whose clients do 1 to `epochs` local epochs; who and how many is drawn
    once.
    """

    dropout: float = 0.0
    dropout_rule: Literal["exact", "bernoulli"] = "exact"
    stragglers: float = 0.0

    def vanished(self, cohort: int, seed: int, round: int) -> NDArray[np.bool_]:
        """Which places of a cohort are lost this round, `(cohort,)`."""
        rng = generator(seed, Purpose.DROPOUT, round)
        if self.dropout_rule == "bernoulli":
            return rng.random(cohort) < self.dropout
        lost = np.zeros(cohort, dtype=np.bool_)
        lost[rng.permutation(cohort)[: min(math.floor(self.dropout * cohort + 1e-9), cohort - 1)]] = True
        return lost

    def epochs(self, clients: int, epochs: int, seed: int) -> NDArray[np.int64]:
        """Local epochs of every client of the pool, `(clients,)`, the same in every round."""
        each = np.full(clients, epochs, dtype=np.int64)
        slow = math.floor(self.stragglers * clients + 1e-9)
        if slow:
            rng = generator(seed, Purpose.STRAGGLERS)
            each[rng.permutation(clients)[:slow]] = rng.integers(1, max(epochs, 1), size=slow, endpoint=True)
        return each
