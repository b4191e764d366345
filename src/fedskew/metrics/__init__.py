"""Figures of a model, of a cohort, of a round's updates."""

from __future__ import annotations

from fedskew.metrics._cohort import cohort_entropy, mix_distance
from fedskew.metrics._confusion import (
    balanced_accuracy,
    confusion_matrix,
    macro_f1,
    per_class_accuracy,
    target_accuracy,
)
from fedskew.metrics._drift import drift_diversity
from fedskew.metrics._groups import ClassGroups, class_groups

__all__ = [
    "ClassGroups",
    "balanced_accuracy",
    "class_groups",
    "cohort_entropy",
    "confusion_matrix",
    "drift_diversity",
    "macro_f1",
    "mix_distance",
    "per_class_accuracy",
    "target_accuracy",
]
