"""GreedyKL: Yang et al., "Federated Learning with Class Imbalance Reduction", 2021, with the label counts known.

The first client is the one whose labels are nearest to uniform; each next one is the client that brings the cohort's
summed labels nearest to uniform, in KL divergence KL(P || U) = log2 C - H(P). This is FedEntOpt's criterion without its
random start and its buffer, so the cohort is the same in every round. The paper sums normalised histograms (here with
`normalise`) and estimates them from gradients (CUCB); here the label counts are known.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedskew.labels import LabelCounts
from fedskew.parameters import FloatArray, IntArray, Switch, component
from fedskew.selection._protocol import EVEN_LABELS, Checked, even_cohort


@component
class GreedyKL(Checked):
    """Greedy minimisation of the KL divergence of the cohort's labels to uniform.

    Attributes:
        normalise: Sum label shares instead of counts, so that all clients count equally, whatever their size.
    """

    paper: ClassVar[str] = "Yang et al., arXiv 2011.11266"
    needs_label_counts: ClassVar[bool] = True
    fixed_cohort: ClassVar[bool] = True
    warns: ClassVar[Mapping[str, str]] = EVEN_LABELS

    normalise: Switch = False

    def _choose(
        self, state: None, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, None]:
        if self.normalise:
            counts = LabelCounts(counts).marginals
        return even_cohort(counts, np.arange(len(counts)), size, first), None
