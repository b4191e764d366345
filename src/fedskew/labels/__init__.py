"""Which labels each client holds: counts, measures of skew, private release."""

from __future__ import annotations

from fedskew.labels._counts import CountsLike, LabelCounts, as_counts, as_sizes, as_target
from fedskew.labels._measures import (
    GROUPS,
    class_group_matrix,
    effective_sample_size,
    entropy,
    kl_to_uniform,
    projection_distance,
)

__all__ = [
    "GROUPS",
    "CountsLike",
    "LabelCounts",
    "as_counts",
    "as_sizes",
    "as_target",
    "class_group_matrix",
    "effective_sample_size",
    "entropy",
    "kl_to_uniform",
    "projection_distance",
]
