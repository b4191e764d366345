"""Krum and multi-Krum: the updates that have the nearest neighbours.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017. Of n updates, f of them bad,

    s(i) = sum of ||D_i - D_j||^2 over the n - f - 2 updates j nearest to i

Krum takes the update of the lowest s; multi-Krum takes the `keep` lowest (the paper's m). The paper's guarantee needs
n > 2 f + 2; a cohort that can't have so many clients is refused, and a round in which fewer reply leaves the model as
it was. Of equal scores the first client's counts as the lower.

Distances don't depend on weights, so a client gains nothing here by what it reports. Weights are used afterwards:
multi-Krum averages the chosen by their weights, renormalised (equally where all of them are 0), as the engine and
Flower's `Krum` and `MultiKrum` do. Under label skew the update with the nearest neighbours is that of a common mix of
labels: a class that few clients hold is left out with its clients, the more the smaller `keep` is.
"""

from typing import ClassVar

import numpy as np
from torch import Tensor

from fedskew.aggregation._protocol import Robust, products
from fedskew.parameters import Count, FloatArray, Size, component


@component
class Krum(Robust):
    """The update with the nearest neighbours, or the weighted mean of several.

    Attributes:
        malicious: The number f of bad clients in a cohort that it tolerates.
        keep: How many updates are taken: 1 is Krum, more are multi-Krum; at most all but `malicious` that replied.
    """

    paper: ClassVar[str] = "Blanchard et al., NeurIPS 2017"

    malicious: Size = 1
    keep: Count = 1

    @property
    def least(self) -> int:
        """More than 2 f + 2."""
        return 2 * self.malicious + 3

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Return the updates as they are, and weights that are 0 for those not taken; see `Aggregation.combine`."""
        inner = products(updates)
        squares = np.diag(inner)
        distances = np.maximum(squares[:, None] + squares - 2 * inner, 0)
        np.fill_diagonal(distances, np.inf)
        neighbours = len(weights) - self.malicious - 2
        scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
        taken = np.argsort(scores, kind="stable")[: min(self.keep, len(weights) - self.malicious)]
        shares = np.zeros_like(weights)
        shares[taken] = weights[taken] if weights[taken].sum() > 0 else 1
        return updates, shares / shares.sum()
