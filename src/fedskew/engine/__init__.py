"""Runs rounds: the algorithm once, and the backends that train a cohort."""

from fedskew.engine._records import ClientEvaluation, Evaluation, Round

__all__ = ["ClientEvaluation", "Evaluation", "Round"]
