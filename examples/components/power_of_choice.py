"""Power-of-choice: of some candidates those train on whose samples the present model is worst.

Cho et al., "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection Strategies",
2020. Each round, with m the clients of a cohort:

    1. d candidates are drawn without replacement, each with its share of the samples as probability;
    2. each gets the model and returns its loss, the mean over all its samples;
    3. the m candidates with the largest losses train.

What the second step sends is in the record's traffic: d models down, d numbers up. Real sites tell no losses before a
round, and masks would hide them, so both refuse it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.labels import as_counts


@dataclass(frozen=True)
class PowerOfChoice:
    """Asks for losses of the present model: `losses(ids)`."""

    needs_label_counts: ClassVar[bool] = False
    refuses: ClassVar[dict[str, str]] = {"pipeline.fedconcat": "it has no model to ask about yet; take uniform"}

    candidates: int = 20

    def init(self, counts):
        return None

    def select(self, state, counts, size, rng, losses, log):
        sizes = as_counts(counts).sum(axis=1)
        number = min(max(self.candidates, size), np.count_nonzero(sizes))
        drawn = rng.choice(len(sizes), number, replace=False, p=sizes / sizes.sum())
        found = losses(drawn)
        log("mean loss of candidates", found.mean())
        return drawn[np.argsort(-found, kind="stable")[:size]], state
