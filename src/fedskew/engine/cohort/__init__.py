"""Trains a whole cohort in lock-step: parameters are stacked, and a local step is taken for all clients at once.

`_backend` divides a cohort into stacks, `_stack` schedules the steps of a stack, `_step` computes one step, `_layers`
maps the network over clients, `_rules` makes choices from tensor shapes, and `capture` runs steps as CUDA graphs.
"""

from fedskew.engine.cohort._backend import CohortBackend, CohortRequest, train_together
from fedskew.engine.cohort._rules import CONVOLUTION_FORMS, faster_together

__all__ = ["CONVOLUTION_FORMS", "CohortBackend", "CohortRequest", "faster_together", "train_together"]
