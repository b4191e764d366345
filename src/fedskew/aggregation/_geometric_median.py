"""The geometric median of the updates, weighted: RFA.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning", 2019 (IEEE TSP 2022):

    v = argmin sum_k a_k ||v - D_k||

by the smoothed Weiszfeld algorithm (their algorithm 2):

    b_k <- a_k / max(nu, ||v - D_k||),    v <- sum_k b_k D_k / sum_k b_k

In the paper the server never sees an update, so each step costs a round of messages, and it takes three steps. Here the
server has all updates: it starts at the sent model (v = 0), where a bad update pulls no more than its weight, and
repeats until the weights b / sum b no longer change. They need only the updates' inner products, which take one pass
over the updates.

The result is a mean with other weights, so it goes with every server update; the record holds these weights. As long as
bad clients have less than half of the weight, they can't move it arbitrarily far.
"""

from typing import ClassVar

import numpy as np
from torch import Tensor

from fedskew.aggregation._protocol import Robust, products
from fedskew.parameters import FloatArray, Positive, component

MOST_STEPS = 1000
CONVERGED = 1e-12


@component
class GeometricMedian(Robust):
    """The weighted geometric median of the updates.

    Attributes:
        nu: Lower bound on distances, which keeps a step defined at a client's own update.
    """

    paper: ClassVar[str] = "Pillutla et al., IEEE TSP 2022"

    nu: Positive = 1e-6

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Return the updates as they are, and the weights that make their sum the median; see `Aggregation.combine`."""
        inner = products(updates)
        squares = np.diag(inner)
        following = np.zeros_like(weights)
        for _ in range(MOST_STEPS):
            shares = following
            distances = np.sqrt(np.maximum(squares - 2 * inner @ shares + shares @ inner @ shares, 0))
            pulls = weights / np.maximum(self.nu, distances)
            following = pulls / pulls.sum()
            if np.abs(following - shares).max() <= CONVERGED:
                break
        return updates, following
