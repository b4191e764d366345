"""The coordinate-wise median, weighted.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018, definition 1, with weights: in each coordinate the value at which the sorted clients' weights add up to 1/2; where
they do so exactly between two values, the mean of both. With equal weights: the usual median, Flower's `FedMedian`.

While the bad clients hold less than half of the weight, every coordinate lies among the honest values. Under label skew
these disagree, and the median of skewed values is not their mean: it costs accuracy where nobody is bad.
"""

from typing import ClassVar

import numpy as np
from torch import Tensor

from fedskew.aggregation._protocol import Merging, by_coordinate
from fedskew.parameters import FloatArray, component

HALF = 0.5 - 1e-9
"""Share of the weight cut off at each end: below 1/2, so that in spite of rounding two values in the middle count."""


@component
class Median(Merging):
    """The weighted median of each coordinate."""

    paper: ClassVar[str] = "Yin et al., ICML 2018"

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Return the one median; see `Aggregation.combine`."""
        return by_coordinate(updates, weights, HALF), np.ones(1)
