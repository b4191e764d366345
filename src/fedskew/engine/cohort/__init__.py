"""Trains a whole cohort in lock-step: parameters are stacked, and a local step is taken for all clients at once.

`_backend` divides a cohort into stacks, `_stack` takes their steps, and `_layers` maps the network over clients.
"""

from fedskew.engine.cohort._backend import CohortBackend as CohortBackend
from fedskew.engine.cohort._backend import run_round_together as run_round_together
