"""GreedyKL: Yang et al., "Federated Learning with Class Imbalance Reduction", 2021, with the label counts known.

The first client is the one whose labels are nearest to uniform; each next one is the client that brings the cohort's
summed labels nearest to uniform, in KL divergence KL(P || U) = log2 C - H(P). This is FedEntOpt's criterion without its
random start and its buffer, so the cohort is the same in every round. The paper sums normalised histograms (here with
`normalise`) and estimates them from gradients (CUCB); here the label counts are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedskew.labels import CountsLike, LabelCounts, as_counts
from fedskew.parameters import Switch, component
from fedskew.selection._evenness import even_cohort
from fedskew.selection._protocol import EVEN_LABELS, IntArray, check_round


@component
class GreedyKL:
    """Greedy minimisation of the KL divergence of the cohort's labels to uniform.

    Attributes:
        normalise: Sum label shares instead of counts, so that all clients count equally, whatever their size.
    """

    paper: ClassVar[str] = "Yang et al., arXiv 2011.11266"
    needs_label_counts: ClassVar[bool] = True
    fixed_cohort: ClassVar[bool] = True
    warns: ClassVar[Mapping[str, str]] = EVEN_LABELS

    normalise: Switch = False

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
        """Choose a cohort; see `Selection.select`. `rng` is not used."""
        counts = as_counts(counts)
        check_round(len(counts), size, first)
        if self.normalise:
            counts = LabelCounts(counts).marginals
        return even_cohort(counts, np.arange(len(counts)), size, first), None
