"""Trains a whole cohort in lock-step: parameters are stacked, and a local step is taken for all clients at once.

`_backend` divides a cohort into stacks, `_stack` schedules the steps of a stack, `_step` computes one step, `_layers`
maps the network over clients, and `_rules` makes choices from tensor shapes.
"""

from fedskew.engine.cohort._backend import CohortBackend, CohortRequest, run_round_together, train_together
from fedskew.engine.cohort._rules import CONVOLUTION_FORMS, faster_together

__all__ = [
    "CONVOLUTION_FORMS",
    "CohortBackend",
    "CohortRequest",
    "faster_together",
    "run_round_together",
    "train_together",
]
