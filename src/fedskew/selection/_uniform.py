"""Uniform selection: every cohort is equally likely (FedAvg, McMahan et al., 2017)."""

from typing import ClassVar

import numpy as np

from fedskew.parameters import FloatArray, IntArray, component
from fedskew.selection._protocol import Checked


@component
class Uniform(Checked):
    """Draws clients uniformly, without replacement; label counts are not used."""

    needs_label_counts: ClassVar[bool] = False
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def _choose(
        self, state: None, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, None]:
        """Draw a cohort; with `first`, the rest is drawn from the other clients."""
        clients = len(counts)
        if first is None:
            return rng.choice(clients, size, replace=False), None
        others = rng.choice(clients - 1, size - 1, replace=False)
        return np.concatenate([[first], others + (others >= first)]).astype(np.int64), None
