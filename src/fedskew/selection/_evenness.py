"""Greedy choice of a cohort whose pooled labels are even.

Let p be the pooled label counts of the clients chosen so far and S their sum, x a client's label counts and n their
sum, and g(t) = t log2 t. The entropy of p + x is

    H = log2(S + n) - (sum_c g(p_c) + sum_{c: x_c > 0} [g(p_c + x_c) - g(p_c)]) / (S + n),

so that only the classes that a client holds need to be looked at.
"""

from __future__ import annotations

import numpy as np

from fedskew.selection._protocol import FloatArray, IntArray

TIE = 1e-12
"""Smaller differences, of entropies in bits or of numbers of samples, are ties, so that rounding does not decide."""


def even_cohort(counts: FloatArray, candidates: IntArray, size: int, first: int | None = None) -> IntArray:
    """Choose clients one by one so that the pooled labels of the chosen clients are as even as possible.

    Every choice maximises the entropy of the pooled labels, that is, minimises their KL divergence to uniform. Of the
    clients within `TIE` bits of the maximum, the one with the lowest id is chosen. `candidates` are ascending.
    """
    cohort = np.empty(size, dtype=np.int64)
    pooled = np.zeros(counts.shape[1])
    owners, labels = np.nonzero(counts[candidates])
    held, sizes = counts[candidates[owners], labels], counts[candidates].sum(axis=1)
    left = np.ones(len(candidates), dtype=bool)
    for turn in range(size):
        if turn or first is None:
            terms, totals = _terms(pooled), sizes + pooled.sum()
            totals[totals == 0] = 1
            gains = np.bincount(owners, _terms(held + pooled[labels]) - terms[labels], len(sizes))
            entropies = np.where(left, np.log2(totals) - (gains + terms.sum()) / totals, -np.inf)
            place = int(np.argmax(entropies >= entropies.max() - TIE))
        else:
            place = int(np.searchsorted(candidates, first))
        left[place] = False
        cohort[turn] = candidates[place]
        pooled += counts[cohort[turn]]
    return cohort


def _terms(amounts: FloatArray) -> FloatArray:
    """Compute g(t) = t log2 t, with g(0) = 0."""
    terms: FloatArray = amounts * np.log2(np.where(amounts > 0, amounts, 1))
    return terms
