"""Which labels each client holds: counts, measures of skew, private release."""

from __future__ import annotations

from fedskew.labels._counts import CountsLike, LabelCounts, as_counts, as_sizes, as_target
from fedskew.labels._csv import lists_samples, read_target
from fedskew.labels._measures import (
    GROUPS,
    class_group_matrix,
    effective_sample_size,
    entropy,
    kl_to_uniform,
    projection_distance,
)
from fedskew.labels._release import SENSITIVITY, privatize
from fedskew.labels._report import SkewReport, describe, sentences, statistics

__all__ = [
    "GROUPS",
    "SENSITIVITY",
    "CountsLike",
    "LabelCounts",
    "SkewReport",
    "as_counts",
    "as_sizes",
    "as_target",
    "class_group_matrix",
    "describe",
    "effective_sample_size",
    "entropy",
    "kl_to_uniform",
    "lists_samples",
    "privatize",
    "projection_distance",
    "read_target",
    "sentences",
    "statistics",
]
