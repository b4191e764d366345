"""Greedy choice of a cohort whose pooled labels are even.

Let p be the pooled label counts of the clients chosen so far and S their sum, x a client's label counts and n their
sum, C the number of classes, and g(t) = t log2 t. The entropy of p + x is

    H = log2(S + n) - (sum_c g(p_c) + b) / (S + n),      b = sum_c [g(p_c + x_c) - g(p_c)] .

Three things make a choice cheap:

- A client that joins changes p only in the classes that it holds, so each b is updated in those classes alone.
- Counts are usually whole numbers, with far fewer distinct values than there are clients. The term that a class adds to
  b is then computed once for each value and looked up.
- A client far from even can't bring a nearly even pool nearer to even. With r the Euclidean distance of x from the
  vector of n / C, e that of p from the vector of S / C, and N = C |r - e| / (S + n),

      log2 C - H  >=  N^2 / (2 C ln 2 (1 + N / 3)) .

  Clients are therefore searched in blocks of similar r, in the order of the largest H that this bound allows a block,
  until no further block can hold the best client.

The bound follows from Bernstein's inequality. With u_c = C (p_c + x_c) / (S + n) - 1, a vector of norm at least N,
log2 C - H is the mean of (1 + u) ln(1 + u) - u divided by ln 2, which is at least the mean of u^2 / 2 / (1 + u / 3)
divided by ln 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedskew.selection._protocol import FloatArray, IntArray

TIE = 1e-12
"""Smaller differences, of entropies in bits or of numbers of samples, are ties, so that rounding does not decide."""

_ROUNDING = 2e-13  # bound on the error of updated entropies (largest seen: 4e-14)
_FRESH = 64  # number of updates after which gains are computed anew
_ROWS = 1 << 15  # clients in a block: small enough for the arrays of a block to stay in the cache
_NUMBERS = 1 << 16  # counts that are read at a time; they too stay in the cache
_SHORTER = 16  # counts are looked up if there are this many times more clients than distinct values
_TINY = np.finfo(np.float64).tiny  # takes the place of 0 in logarithms and denominators


def even_cohort(counts: FloatArray, candidates: IntArray, size: int, first: int | None = None) -> IntArray:
    """Choose clients one by one so that the pooled labels of the chosen clients are as even as possible.

    Every choice maximises the entropy of the pooled labels, that is, minimises their KL divergence to uniform. Of the
    clients within `TIE` bits of the maximum, the one with the lowest id is chosen. Memory beyond the counts: at most a
    quarter of the memory of the candidates' counts if these are whole numbers, else as much as them.

    Args:
        counts: Label counts, shape `(clients, classes)`.
        candidates: Ids of the clients to choose from, ascending.
        size: Number of clients to choose.
        first: Id of the client to choose first; None: the best one.

    Returns:
        Client ids in the order of choice, shape `(size,)`.
    """
    cohort = np.empty(size, dtype=np.int64)
    pooled = np.zeros(counts.shape[1])
    pool = _Candidates(counts, candidates)
    for turn in range(size):
        cohort[turn] = pool.most_even(pooled) if turn or first is None else first
        pool.remove(cohort[turn])
        pooled += counts[cohort[turn]]
    return cohort


class _Candidates:
    """The clients that can still be chosen, in blocks of clients whose labels are about equally far from even."""

    def __init__(self, counts: FloatArray, ids: IntArray) -> None:
        self._counts = counts
        sizes, distances = np.empty(len(ids)), np.empty(len(ids))
        for part in _parts(len(ids), max(1, _NUMBERS // counts.shape[1])):
            rows = counts[ids[part]]
            sizes[part] = rows.sum(axis=1)
            distances[part] = _norms(rows - sizes[part, None] / rows.shape[1])
        order = np.argsort(distances, kind="stable")
        self._blocks = [_Block(counts, ids[order[part]], sizes[order[part]]) for part in _parts(len(ids), _ROWS)]
        bounds = [distances[order[part]] for part in _parts(len(ids), _ROWS)]
        self._nearest = np.array([part[0] for part in bounds])
        self._furthest = np.array([part[-1] for part in bounds])
        self._largest = np.array([block.sizes.max() for block in self._blocks])

    def most_even(self, pooled: FloatArray) -> np.int64:
        """Return the client that makes the pool most even; of those that tie, the lowest id."""
        best, near = -math.inf, []
        most = self._most(pooled)
        for place in np.argsort(-most, kind="stable"):
            if most[place] < best - 2 * TIE:
                break
            block = self._blocks[place]
            entropies = block.entropies(pooled)
            best = max(best, float(entropies.max()))
            rows = np.flatnonzero(entropies >= best - 2 * TIE)
            near.append((block.ids[rows], entropies[rows]))
        ids = np.concatenate([found for found, _ in near])
        below = best - np.concatenate([found for _, found in near])
        sure: np.int64 = ids[below <= TIE - _ROUNDING].min()
        if not np.any((ids < sure) & (below <= TIE + _ROUNDING)):
            return sure
        entropies = _pooled_entropies(self._counts, ids, pooled)
        lowest: np.int64 = ids[entropies >= entropies.max() - TIE].min()
        return lowest

    def remove(self, client: np.int64) -> None:
        """Exclude a client from later choices."""
        for block in self._blocks:
            block.remove(client)

    def _most(self, pooled: FloatArray) -> FloatArray:
        """Return the upper bound of each block's entropies, `(blocks,)` (see the top of the file)."""
        classes, total = len(pooled), pooled.sum()
        here = _norms(pooled[None] - total / classes)[0]
        apart = np.maximum(np.maximum(self._nearest - here, here - self._furthest), 0.0)
        norm = classes * apart / np.maximum(total + self._largest, _TINY)
        most: FloatArray = math.log2(classes) - norm**2 / (2 * classes * math.log(2) * (1 + norm / 3))
        return most


class _Block:
    """A block of candidates.

    Attributes:
        ids: The clients' ids.
        sizes: Their numbers of samples.
        gains: The term b of each client (see the top of the file); infinite once the client is removed.
    """

    def __init__(self, counts: FloatArray, ids: IntArray, sizes: FloatArray) -> None:
        self.ids, self.sizes, self.gains = ids, sizes, np.zeros(len(ids))
        self._held = _Coded.of(counts, ids) or _Plain(counts[ids])
        self._pooled = np.full(counts.shape[1], np.nan)  # the pool that `gains` are computed for; none yet
        self._updates = 0

    def entropies(self, pooled: FloatArray) -> FloatArray:
        """Compute the entropy of `pooled` plus each client's labels, in bits; 0 if empty, -infinity once removed."""
        self._update(pooled)
        total = self.sizes + pooled.sum()
        total[total == 0] = 1
        part = self.gains + _terms(pooled).sum()
        part /= total
        entropies: FloatArray = np.log2(total, out=total)
        entropies -= part
        return entropies

    def remove(self, client: np.int64) -> None:
        """Exclude a client from later choices."""
        self.gains[np.flatnonzero(self.ids == client)] = np.inf

    def _update(self, pooled: FloatArray) -> None:
        old = self._pooled
        changed = np.flatnonzero(pooled != old)
        anew = self._updates == _FRESH or 2 * len(changed) > len(pooled)
        if anew:
            self.gains[self.gains < np.inf] = 0
        labels = np.arange(len(pooled)) if anew else changed
        self._held.add(self.gains, labels, pooled, None if anew else old)
        self._updates = 0 if anew else self._updates + 1
        self._pooled = pooled.copy()


class _Plain:
    """Label counts of a block's clients, stored as they are."""

    def __init__(self, rows: FloatArray) -> None:
        self._columns = np.ascontiguousarray(rows.T)

    def add(self, gains: FloatArray, labels: IntArray, pooled: FloatArray, old: FloatArray | None) -> None:
        """Add the terms of these classes at the pool `pooled` to `gains`, and subtract those at the pool `old`."""
        for part in _parts(len(labels), max(1, _NUMBERS // len(gains))):
            held, here = self._columns[labels[part]], labels[part, None]
            gains += _gains(held, pooled[here]).sum(axis=0)
            if old is not None:
                gains -= _gains(held, old[here]).sum(axis=0)


class _Coded:
    """Label counts of many clients, stored as small whole numbers: a term is computed once for each and looked up."""

    def __init__(self, codes: NDArray[np.uint16]) -> None:
        self._codes, self._amounts = codes, np.arange(codes.max() + 1.0)

    @classmethod
    def of(cls, counts: FloatArray, ids: IntArray) -> _Coded | None:
        """Code the counts; None if coding would change them or save nothing."""
        codes = np.empty((counts.shape[1], len(ids)), dtype=np.uint16)
        for part in _parts(len(ids), max(1, _NUMBERS // counts.shape[1])):
            rows = counts[ids[part]]
            if rows.max() * _SHORTER >= min(len(ids), 1 << 16):
                return None
            codes[:, part] = rows.T
            if not np.array_equal(codes[:, part].T, rows):
                return None
        return cls(codes)

    def add(self, gains: FloatArray, labels: IntArray, pooled: FloatArray, old: FloatArray | None) -> None:
        """See `_Plain.add`."""
        added = _gains(self._amounts, pooled[labels, None])
        if old is not None:
            added -= _gains(self._amounts, old[labels, None])
        here = np.empty_like(gains)
        for label, amounts in zip(labels, added, strict=True):
            gains += amounts.take(
                self._codes[label], out=here, mode="clip"
            )  # "clip" skips the check of bounds; codes are in range


def _gains(held: FloatArray, pooled: FloatArray) -> FloatArray:
    """Compute g(p_c + x_c) - g(p_c)."""
    return _terms(held + pooled) - _terms(pooled)


def _terms(amounts: FloatArray) -> FloatArray:
    """Compute g(t) = t log2 t, with g(0) = 0."""
    terms: FloatArray = np.log2(np.maximum(amounts, _TINY))
    terms *= amounts
    return terms


def _pooled_entropies(counts: FloatArray, ids: IntArray, pooled: FloatArray) -> FloatArray:
    """Compute the entropy of pooled + counts[id] for every id, in bits; 0 if there is no sample."""
    entropies = np.zeros(len(ids))
    for part in _parts(len(ids), max(1, _NUMBERS // counts.shape[1])):
        block = counts[ids[part]] + pooled
        logs = np.log2(np.maximum(block, _TINY))
        total = block.sum(axis=1)
        held = total > 0
        terms = np.einsum("ij,ij->i", block, logs)
        entropies[part][held] = np.log2(total[held]) - terms[held] / total[held]
    return entropies


def _parts(length: int, most: int) -> Iterator[slice]:
    return (slice(start, start + most) for start in range(0, length, most))


def _norms(rows: FloatArray) -> FloatArray:
    norms: FloatArray = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return norms
