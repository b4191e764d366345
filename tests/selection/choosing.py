"""Cohorts by a selection, without a run."""

import math
from typing import Any

import numpy as np


def chosen(selection: Any, counts: Any, size: int, seed: int = 0, state: Any = None, **options: Any) -> list[int]:
    """The cohort, from the first state unless another is given."""
    state = selection.init(counts) if state is None else state
    cohort, _ = selection.select(state, counts, size, np.random.default_rng(seed), **options)
    assert cohort.dtype == np.int64
    return cohort.tolist()


def played(selection: Any, counts: Any, rounds: int, size: int = 10, **options: Any) -> tuple[list[list[int]], Any]:
    """The cohorts of some rounds, and the last state."""
    state, cohorts = selection.init(counts), []
    for round in range(rounds):
        cohort, state = selection.select(state, counts, size, np.random.default_rng(round), **options)
        cohorts.append(cohort.tolist())
    return cohorts, state


def entropy(counts: Any) -> float:
    """In bits; 0 of nothing."""
    total = math.fsum(counts)
    return -math.fsum(n / total * math.log2(n / total) for n in counts if n > 0) if total else 0.0
