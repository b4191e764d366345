"""The greedy way to a cohort whose pooled labels are even."""

from __future__ import annotations

import numpy as np

from fedskew.selection._protocol import FloatArray, IntArray

TIE = 1e-12
"""What differs by less is the same, so that rounding does not choose: entropies in bits, numbers of samples."""

_BLOCK = 1 << 16  # numbers at a time: they stay in the cache, and memory does not grow with the clients


def even_cohort(counts: FloatArray, candidates: IntArray, size: int, first: int | None = None) -> IntArray:
    """`size` of the candidates in order of choice: each makes the pooled labels of those so far most even.

    `counts`: `(clients, classes)`; `candidates`: client ids, ascending; `first`: the one to begin with. Every choice
    maximises the entropy of the pooled labels, or, which is the same, minimises their KL divergence to uniform; the
    lowest id of those within `TIE` bits of the maximum. It is one pass over the candidates' counts.
    """
    cohort = np.empty(size, dtype=np.int64)
    pooled = np.zeros(counts.shape[1])
    for turn in range(size):
        if turn == 0 and first is not None:
            cohort[turn] = first
        else:
            entropies = _pooled_entropies(counts, candidates, pooled)
            cohort[turn] = candidates[np.argmax(entropies >= entropies.max() - TIE)]
        candidates = candidates[candidates != cohort[turn]]
        pooled += counts[cohort[turn]]
    return cohort


def _pooled_entropies(counts: FloatArray, candidates: IntArray, pooled: FloatArray) -> FloatArray:
    """The entropy of pooled + counts[candidate] for every candidate, in bits; 0 where there is no sample."""
    entropies = np.zeros(len(candidates))
    rows = max(1, _BLOCK // counts.shape[1])
    for start in range(0, len(candidates), rows):
        block = counts[candidates[start : start + rows]] + pooled
        # H = log2 S - (1/S) sum of x log2 x. The floor makes 0 log 0 = 0.
        logs = np.log2(np.maximum(block, np.finfo(np.float64).tiny))
        total = block.sum(axis=1)
        held = total > 0
        part = np.einsum("ij,ij->i", block, logs)
        entropies[start : start + rows][held] = np.log2(total[held]) - part[held] / total[held]
    return entropies
