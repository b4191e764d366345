"""Confidence intervals of a label mix from few samples of the target, by turning tests round.

A share v of class c stays in the interval unless a score this large, or this small, would be rare if v were true:

    score = sum over the target's samples of w[cell],   w = argmin sum_j s_j w_j^2  with  sum_j M_yj w_j = [y = c]

M_y are the held-out profiles of class y and s the cells' expected shares, so that the score counts class c's samples,
without bias whatever the mix. How many of n samples are of class c is binomial in v; given that number, mean, variance
and third moment of the score follow from the multinomials of the target and of the held-out samples, and a gamma
distribution has the same three (Pearson's type III). With a perfect model this is Clopper's and Pearson's interval.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import gammainc, gammaincc, ndtr
from scipy.stats import binom

from fedskew.labels._counts import FloatArray

UNSEEN = 0.25
"""Added to each cell's count in its variance: with it the test at 5 % rejects about 5 % (benchmarks/target_mix.py)."""

_GRID = np.linspace(0.0, 1.0, 1001)
_SYMMETRIC = 0.01
_NEAR = 1e-7
_HALF = 0.5  # of a sample: correction for continuity, as the number of samples is whole


@dataclass(frozen=True)
class FewSamples:
    """What the intervals of a mix from few samples are made of, for classes with held-out samples: their `profiles` by
    cell, `(classes, cells)`, none empty in all, how many they are of (None: they are known), the target's `shares`."""

    profiles: FloatArray
    sizes: FloatArray | None
    shares: FloatArray
    samples: int
    mix: FloatArray

    def interval(self, level: float) -> FloatArray:
        """Return the ends of each class's interval, shape `(classes, 2)`; [0, 1] where the cells don't tell a class."""
        number, classes = self.samples, len(self.mix)
        likely = (number * self.mix + 1 / classes) / (number + 1)  # no class is taken to be absent
        scaled = self.profiles / (likely @ self.profiles)
        weights = np.linalg.pinv(scaled @ self.profiles.T, hermitian=True) @ scaled
        told = np.abs(weights @ self.profiles.T - np.eye(classes)).max(axis=1) < _NEAR
        chances = _chances(number)
        ends = np.tile([0.0, 1.0], (classes, 1))
        for label in np.flatnonzero(told):
            tails: FloatArray = chances @ self._tails(int(label), likely, weights[label])
            inside = tails.min(axis=1) >= (1 - level) / 2
            ends[label] = _GRID[inside][[0, -1]] if inside.any() else ends[label]
        return np.stack([np.minimum(ends[:, 0], self.mix), np.maximum(ends[:, 1], self.mix)], axis=1)

    def _tails(self, label: int, likely: FloatArray, weights: FloatArray) -> FloatArray:
        """How often a score is the target's or more, and or less; a row for each number of samples of the class."""
        own = np.arange(self.samples + 1.0)
        rest, is_own = self.samples - own, np.arange(len(likely)) == label
        others = np.where(is_own, 0.0, likely) / max(likely[~is_own].sum(), np.finfo(float).tiny)
        second, third = _moments(self.profiles, weights)
        variance = own * second[label] + rest * (others @ second)
        skew = own * third[label] + rest * (others @ third)
        if self.sizes is not None:
            counts = self.profiles * self.sizes[:, None] + UNSEEN
            totals = counts.sum(axis=1)
            second, third = _moments(counts / totals[:, None], weights)
            second, third = second * totals / self.sizes**2, 2 * third * totals / self.sizes**3
            variance += own**2 * second[label] + rest**2 * (others**2 @ second)
            skew += own**3 * third[label] + rest**3 * (others**3 @ third)
        score = np.clip(self.samples * (self.shares @ weights), 0, self.samples)
        deviation = np.sqrt(np.maximum(variance, _NEAR))
        more = _upper_tail((score - _HALF - own) / deviation, skew / deviation**3)
        less = _upper_tail((own - score - _HALF) / deviation, -skew / deviation**3)
        return np.stack([more, less], axis=1)


@lru_cache(maxsize=4)
def _chances(number: int) -> FloatArray:
    """How often so many of a number of samples are of a class: a row for each share, a column for each count."""
    chances: FloatArray = binom.pmf(np.arange(number + 1), number, _GRID[:, None])
    return chances


def _moments(profiles: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Second and third central moments of a sample's weight, for each class."""
    apart = weights - (profiles @ weights)[:, None]
    return (profiles * apart**2).sum(axis=1), (profiles * apart**3).sum(axis=1)


def _upper_tail(distance: FloatArray, skew: FloatArray) -> FloatArray:
    """How often Pearson's type III variable of mean 0, variance 1 and some skew exceeds a distance."""
    shape = 4 / np.maximum(np.abs(skew), _SYMMETRIC) ** 2
    place = np.maximum(shape + np.sign(skew) * distance * np.sqrt(shape), 0.0)
    tail = np.where(skew > 0, gammaincc(shape, place), gammainc(shape, place))
    chance: FloatArray = np.where(np.abs(skew) < _SYMMETRIC, ndtr(-distance), tail)
    return chance
