"""The coordinate-wise median and trimmed mean, weighted.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018, definitions 1 and 2, with weights. In each coordinate the clients are sorted, the share beta of the weight is cut
off at either end, and what is left is averaged by its weight; a client at the edge is cut in part. With equal weights
and a whole number beta n of clients it is the usual trimmed mean, and Flower's `FedTrimmedAvg`, which rounds another
beta n down: of 3 clients with beta 0.2 it cuts none. It holds against bad clients with at most beta of the weight.

The median is the value at which the sorted clients' weights add up to 1/2; where they do so exactly between two values,
the mean of both. With equal weights: the usual median, Flower's `FedMedian`. While the bad clients hold less than half
of the weight, every coordinate lies among the honest values. Under label skew these disagree, and the median of skewed
values is not their mean: it costs accuracy where nobody is bad.
"""

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
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


@component
class TrimmedMean(Merging):
    """The weighted mean of each coordinate without its largest and smallest values.

    Attributes:
        beta: Share of the weight that is cut off at either end, from 0 to below 0.5.
    """

    paper: ClassVar[str] = "Yin et al., ICML 2018"

    beta: Annotated[float, Field(ge=0, lt=0.5, strict=True)] = 0.2

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Return the one trimmed mean; see `Aggregation.combine`."""
        return by_coordinate(updates, weights, self.beta), np.ones(1)
