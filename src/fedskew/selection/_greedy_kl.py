"""GreedyKL: Yang et al., "Federated Learning with Class Imbalance Reduction", 2021, with the label counts known.

The first client is the one whose labels are nearest to uniform, each next one makes the cohort's summed labels nearest
to uniform, in KL divergence KL(P || U) = log2 C - H(P). So it is FedEntOpt's criterion, without its random start and
its buffer: the same cohort every round. The paper sums normalised histograms (`normalise`) and estimates them from
gradients (CUCB), which is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.about import LABEL_COUNTS, Cost
from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, LabelCounts, as_counts
from fedskew.selection._checks import check_round
from fedskew.selection._evenness import even_cohort
from fedskew.selection._protocol import IntArray


@dataclass(frozen=True)
class GreedyKL:
    """Greedy minimisation of the KL divergence to uniform. `normalise`: clients count alike, whatever their size."""

    paper: ClassVar[str] = "Yang et al., arXiv 2011.11266"
    cost: ClassVar[Cost] = LABEL_COUNTS
    warns: ClassVar[Mapping[str, str]] = {
        "weighting.afl": "AFL looks for the worst client, and never hears of those outside a cohort that is always the "
        "same; uniform and fedentopt hear everybody"
    }

    normalise: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.normalise, bool):
            raise ArgumentError(f"normalise: must be true or false, not {self.normalise!r}")

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
        """See `Selection.select`. It draws nothing."""
        counts = as_counts(counts)
        check_round(len(counts), size, first)
        if self.normalise:
            counts = LabelCounts(counts).marginals
        return even_cohort(counts, np.arange(len(counts)), size, first), None
