"""Measures of a model, of a cohort's labels and of a round's updates."""

from fedskew.metrics._findings import FindingScores as FindingScores
from fedskew.metrics._findings import finding_figures as finding_figures
from fedskew.metrics._measures import balanced_accuracy as balanced_accuracy
from fedskew.metrics._measures import class_groups as class_groups
from fedskew.metrics._measures import drift_diversity as drift_diversity
from fedskew.metrics._measures import macro_f1 as macro_f1
from fedskew.metrics._measures import mean_known as mean_known
from fedskew.metrics._measures import mix_distance as mix_distance
from fedskew.metrics._measures import per_class_accuracy as per_class_accuracy
from fedskew.metrics._measures import target_accuracy as target_accuracy
from fedskew.metrics._scores import Scores as Scores
from fedskew.metrics._sites import SiteRow as SiteRow
from fedskew.metrics._tally import Tally as Tally
