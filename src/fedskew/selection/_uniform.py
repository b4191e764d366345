"""Every cohort is equally likely: McMahan et al., 2017 (FedAvg)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import component
from fedskew.selection._protocol import IntArray, check_rng, check_round


@component
class Uniform:
    """A uniform subset without replacement, whatever the label counts."""

    needs_label_counts: ClassVar[bool] = False
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def init(self, counts: CountsLike) -> None:
        """There is nothing to remember."""

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
        """See `Selection.select`; with `first`, the others are uniform among the other clients."""
        clients = len(as_counts(counts))
        check_round(clients, size, first)
        check_rng(rng)
        if first is None:
            return rng.choice(clients, size, replace=False), None
        others = rng.choice(clients - 1, size - 1, replace=False)
        return np.concatenate([[first], others + (others >= first)]).astype(np.int64), None
