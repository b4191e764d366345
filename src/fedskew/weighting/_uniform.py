"""Equal weights: `a_k = 1 / participants`."""

from __future__ import annotations

from typing import ClassVar

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import component
from fedskew.weighting._protocol import Answered, FloatArray


def uniform(counts: CountsLike) -> FloatArray:
    """The same weight for every client that holds a sample.

    Args:
        counts: Label counts, shape `(clients, classes)`.

    Returns:
        Weights, shape `(clients,)`, sum 1.

    Raises:
        ArgumentError: Wrong shapes or values, or no client holds a sample.
    """
    return _equal(as_counts(counts).sum(axis=1), "counts")


def _equal(held: FloatArray, argument: str) -> FloatArray:
    present = held > 0
    if not present.any():
        raise ArgumentError(f"{argument}: no client holds a sample")
    weights: FloatArray = present / present.sum()
    return weights


@component
class Uniform:
    """Gives every client that holds a sample the same weight, as in SCAFFOLD's mean."""

    needs_label_counts: ClassVar[bool] = False
    weighs_equally: ClassVar[bool] = True
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"

    def weigh(self, answered: Answered) -> FloatArray:
        """Return equal weights of the clients that replied."""
        return _equal(answered.sizes, "sizes")
