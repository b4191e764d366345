"""Trains a whole cohort in lock-step: parameters are stacked, and a local step is taken for all clients at once.

`_backend` deals a cohort out to stacks, `_stack` schedules a stack's steps, `_step` takes one of them, `_layers` maps
the network over clients, `_rules` chooses by shapes, and `capture` runs the same steps as CUDA graphs.
"""

from fedskew.engine.cohort._backend import CohortBackend, CohortRequest, train_together
from fedskew.engine.cohort._rules import CONVOLUTION_FORMS, faster_together

__all__ = ["CONVOLUTION_FORMS", "CohortBackend", "CohortRequest", "faster_together", "train_together"]
