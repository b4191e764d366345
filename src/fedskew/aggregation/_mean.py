"""The weighted mean (McMahan et al., AISTATS 2017): the updates and their weights as they are.

    change = sum_k a_k D_k

A single bad client can move the model anywhere: with weight a_k its update need only be 1 / a_k times as long.
"""

from typing import ClassVar

from torch import Tensor

from fedskew.aggregation._protocol import Aggregation
from fedskew.parameters import FloatArray, component


@component
class Mean(Aggregation):
    """The weighted mean of the updates."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    adds_up: ClassVar[bool] = True

    def combine(self, updates: Tensor, weights: FloatArray) -> tuple[Tensor, FloatArray]:
        """Return both as they are; see `Aggregation.combine`."""
        return updates, weights
