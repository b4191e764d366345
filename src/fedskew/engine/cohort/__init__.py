"""Trains a whole cohort in lock-step: parameters are stacked, and a local step is taken for all clients at once."""

from fedskew.engine.cohort._backend import CohortBackend, Request, train_together
from fedskew.engine.cohort._rules import faster_together

__all__ = ["CohortBackend", "Request", "faster_together", "train_together"]
