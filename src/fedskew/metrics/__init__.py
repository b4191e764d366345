"""Measures of a model, of a cohort's labels and of a round's updates."""

from fedskew.metrics._findings import FindingScores, finding_figures
from fedskew.metrics._measures import (
    balanced_accuracy,
    class_groups,
    drift_diversity,
    macro_f1,
    mix_distance,
    per_class_accuracy,
    target_accuracy,
)
from fedskew.metrics._scores import Scores
from fedskew.metrics._sites import SiteRow
from fedskew.metrics._tally import Tally

__all__ = [
    "FindingScores",
    "Scores",
    "SiteRow",
    "Tally",
    "balanced_accuracy",
    "class_groups",
    "drift_diversity",
    "finding_figures",
    "macro_f1",
    "mix_distance",
    "per_class_accuracy",
    "target_accuracy",
]
