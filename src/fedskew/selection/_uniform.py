"""Uniform selection: every cohort is equally likely (FedAvg, McMahan et al., 2017)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import component
from fedskew.selection._protocol import IntArray, check_rng, check_round


@component
class Uniform:
    """Draws clients uniformly, without replacement; label counts are not used."""

    needs_label_counts: ClassVar[bool] = False
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def init(self, counts: CountsLike) -> None:
        """Return None: there is no state."""

    def check(self, counts: CountsLike, size: int) -> None:
        """See `Selection.check`."""
        check_round(len(as_counts(counts)), size)

    def select(
        self,
        state: None,
        counts: CountsLike,
        size: int,
        rng: np.random.Generator,
        first: int | None = None,
    ) -> tuple[IntArray, None]:
        """Draw a cohort; see `Selection.select`. With `first`, the rest is drawn from the other clients."""
        clients = len(as_counts(counts))
        check_round(clients, size, first)
        check_rng(rng)
        if first is None:
            return rng.choice(clients, size, replace=False), None
        others = rng.choice(clients - 1, size - 1, replace=False)
        return np.concatenate([[first], others + (others >= first)]).astype(np.int64), None
