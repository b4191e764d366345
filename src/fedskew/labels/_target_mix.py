"""The label mix of unlabelled data, estimated from a model's outcomes there and on held-out labelled data.

Label shift means that classes occur more or less often, but that each looks the same: p(x | y) is equal. Then what a
model says of the target's samples is a mix of what it says of each class, and the mix is the unknown:

    p = sum_c q_c M_c        p: shares of the target's samples by outcome cell; M_c: those of class c held out

A cell is what a model says of one sample, in coarse words: the predicted class, and in which bin its confidence lies.
With more cells than classes, cells that no mix explains show that label shift does not hold.

Sources: Lipton, Wang, Smola, "Detecting and Correcting for Label Shift with Black Box Predictors", ICML 2018 (bbse);
Saerens, Latinne, Decaestecker, Neural Computation 2002 (em). Regularised least squares (RLLS) is left out: with the
regulariser that its theory asks for it returned nearly the pooled mix at 2,000 held-out samples.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, null_space, solve_triangular
from scipy.optimize import nnls
from scipy.special import chdtrc, ndtri

from fedskew.errors import ArgumentError
from fedskew.labels._counts import FloatArray, as_amounts, as_floats
from fedskew.labels._mix_interval import UNSEEN, FewSamples
from fedskew.labels._outcomes import MixMethod

_REWEIGHTINGS = 6
_LEAST_IN_A_CELL = 30
_FEW, _FEW_OF_A_CLASS = 500, 300
"""Up to so many samples of a target, or below so many held-out ones of a class, intervals come from tests."""
_COUNTED = 2000
"""Most samples of a target that these count; with few held-out ones more would change little."""
_LARGEST_ERROR, _LARGEST_SUM = 0.06, 0.6
_LEVEL = 0.01
_EXCESS = 0.03
_STEPS = 10_000
_TOLERANCE = 1e-10
_NONE = 1e-9
_NOTHING_KNOWN = 1.0
"""Variance of a direction that the cells say nothing about: wider than any share can vary."""


@dataclass(frozen=True)
class MixEstimate:
    """A label mix, how sure it is, and whether the target's samples look like a mix of the held-out classes at all.

    Attributes:
        mix: Estimated share of each class, shape `(classes,)`, sum 1; 0 for a class without held-out samples.
        covariance: Of `mix`, shape `(classes, classes)`, to first order; rows of classes at 0 are 0.
        upper_errors: Standard error of each class if it were free to leave 0, shape `(classes,)`; that of `covariance`
            for the others.
        statistic: Sum of squared, whitened differences between the target's cells and the estimated mix of classes;
            about chi-square distributed under label shift.
        dof: Its degrees of freedom; 0 where as many cells as classes leave nothing to test.
        p_value: How often label shift alone would give a larger statistic; NaN where there is nothing to test.
        excess: Total variation between the target's cells and the mix of classes beyond what chance explains.
        unseen: Ids of the classes without a held-out sample. The cells can't tell whether the target has them.
        few: What intervals are made of where the target has at most 500 samples, or a class fewer than 300 held-out
            ones; None: they are normal.
    """

    mix: FloatArray
    covariance: FloatArray
    upper_errors: FloatArray
    statistic: float
    dof: int
    p_value: float
    excess: float
    unseen: tuple[int, ...]
    few: FewSamples | None = field(default=None, repr=False, compare=False)

    @classmethod
    def known(cls, mix: FloatArray, unseen: tuple[int, ...] = ()) -> "MixEstimate":
        """Return a mix that was counted: nothing about it is unsure, and there is nothing to test."""
        none = np.zeros_like(mix)
        return cls(mix, np.diag(none), none, np.nan, 0, np.nan, 0.0, unseen)

    @property
    def misfit(self) -> bool:
        """Whether label shift does not hold: p below 0.01 and the cells differ by 3 points more than by chance."""
        return bool(self.p_value < _LEVEL and self.excess > _EXCESS)

    @property
    def error(self) -> float:
        """Root mean square of the standard errors of the classes that could be told (see `upper_errors`)."""
        seen = np.setdiff1d(np.arange(len(self.mix)), self.unseen)
        return float(np.sqrt(np.mean(self.upper_errors[seen] ** 2)))

    @property
    def is_sure(self) -> bool:
        """Whether `error` is at most 0.06, and 0.6 divided by the number of classes: sure enough to be used."""
        return self.error <= min(_LARGEST_ERROR, _LARGEST_SUM / len(self.mix))

    @property
    def standard_errors(self) -> FloatArray:
        """Standard error of each class's share, shape `(classes,)`."""
        return np.sqrt(np.diag(self.covariance))

    def interval(self, level: float = 0.95) -> FloatArray:
        """Return a confidence interval of each class's share, `(classes, 2)`; [0, 1] without held-out samples.

        From at most 500 samples of the target, or fewer than 300 held-out ones of a class, it holds every share that a
        test would not reject; else those within a normal distribution's reach.
        """
        if not 0 < level < 1:
            raise ArgumentError(f"level: must be between 0 and 1, not {level}")
        reach = ndtri((1 + level) / 2) * self.upper_errors
        ends = np.stack([self.mix - reach, self.mix + reach], axis=1).clip(0.0, 1.0)
        if self.few is not None:
            ends[np.setdiff1d(np.arange(len(ends)), self.unseen)] = self.few.interval(level)
        ends[list(self.unseen)] = 0.0, 1.0
        return ends

    def reach(self, values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
        """Return how far below and above `mix @ values` the mean of a value over the target may lie.

        From few samples the classes' intervals are combined as Zou and Donner do (Statistics in Medicine 2008), with
        the correlations of a multinomial; for two classes that is the interval of either share. `values` are
        `(classes,)`; those of classes without held-out samples don't count.
        """
        seen = np.setdiff1d(np.arange(len(self.mix)), self.unseen)
        mix, amounts = self.mix[seen], as_floats(values, "values")[seen]
        if self.few is None:
            length = float(ndtri((1 + level) / 2) * np.sqrt(amounts @ self.covariance[np.ix_(seen, seen)] @ amounts))
            return length, length
        odds = np.sqrt((self.few.samples * mix + 0.5) / (self.few.samples * (1 - mix) + 0.5 * (len(mix) - 1)))
        correlation = -np.outer(odds, odds)
        np.fill_diagonal(correlation, 1.0)
        apart = amounts - mix @ amounts
        low, high = self.interval(level)[seen].T
        lengths = [np.where(apart > 0, *sides) * apart for sides in ((mix - low, high - mix), (high - mix, mix - low))]
        below, above = (float(np.sqrt(max(length @ correlation @ length, 0.0))) for length in lengths)
        return below, above


def estimate_mix(tables: ArrayLike, cells: ArrayLike, method: MixMethod = "gls") -> MixEstimate:
    """Estimate the label mix of unlabelled samples from a model's outcomes.

    Methods: `gls`, generalised least squares, the default; `em-cells`, maximum likelihood of the cells by EM; `bbse`,
    plain least squares (one cell a class: hard BBSE; summed softmax outputs instead of counts: soft BBSE); `em`,
    maximum likelihood of the samples by EM, for which `cells` holds each sample's calibrated probabilities (see
    `calibrate`; without calibration it is of no use).

    Args:
        tables: Held-out samples by true class and outcome cell, shape `(classes, cells)`; summed over sites. With
            several bins a class, the cells of one predicted class stand side by side.
        cells: The target's samples by outcome cell, shape `(cells,)`. For `em` also probabilities, shape `(samples,
            classes)`, whose prior is uniform over the classes that `tables` has samples of.

    Example:
        >>> estimate = estimate_mix([[90, 10], [20, 80]], [55, 45])
        >>> estimate.mix.round(2).tolist()
        [0.5, 0.5]
    """
    if method not in get_args(MixMethod):
        raise ArgumentError(f"method: must be one of {', '.join(get_args(MixMethod))}, not {method!r}")
    held_out, target = _checked(tables, cells, method)
    classes, outcomes = held_out.shape
    sizes = held_out.sum(axis=1)
    held = np.flatnonzero(sizes)
    if target.ndim == 2:
        chances, each = target[:, held], np.full(len(target), 1 / len(target))
        lost = np.flatnonzero(chances.sum(axis=1) == 0)
        if len(lost):
            raise ArgumentError(f"cells: sample {lost[0]} has no probability of any class with held-out samples")
        mix = _expectation_maximisation(chances, each)
        scores = (chances / (chances @ mix)[:, None]).T
        information = scores @ scores.T
        few = FewSamples(scores / np.maximum(scores.sum(axis=1, keepdims=True), _NONE), None, each, len(target), mix)
        uncertain = partial(_covariance, information, information)
        fit = np.nan, 0, np.nan, 0.0
    else:
        bins = outcomes // classes if outcomes % classes == 0 else 1
        sample = _Cells.of(held_out[held], target, bins)
        mix, weight = _SOLVERS[method](sample)
        noise = sample.noise(mix)
        counted = min(_COUNTED, max(1, round(sample.samples)))
        few = FewSamples(sample.profiles, sample.sizes, sample.shares, counted, mix)
        pull = sample.profiles @ weight
        uncertain = partial(_covariance, pull @ sample.profiles.T, pull @ noise @ pull.T)
        fit = _fit(mix, sample, noise)
    covariance = np.zeros((classes, classes))
    covariance[np.ix_(held, held)] = uncertain(mix > 0)
    upper = np.zeros(classes)
    upper[held] = [np.sqrt(uncertain((mix > 0) | freed)[c, c]) for c, freed in enumerate(np.eye(len(held)) > 0)]
    found = np.zeros(classes)
    found[held] = mix
    unseen = tuple(np.flatnonzero(sizes == 0).tolist())
    return MixEstimate(
        found, covariance, upper, *fit, unseen,
        few if few.samples <= _FEW or (few.sizes is not None and few.sizes.min() < _FEW_OF_A_CLASS) else None,
    )  # fmt: skip


def _checked(tables: ArrayLike, cells: ArrayLike, method: str) -> tuple[FloatArray, FloatArray]:
    held_out = as_amounts(tables, "tables", ("classes", "cells"))
    classes, outcomes = held_out.shape
    if method == "em" and np.ndim(cells) == 2:
        target = as_amounts(cells, "cells", ("samples", classes), "each sample's probability of each class")
    else:
        target = as_amounts(cells, "cells", (outcomes,), "one number for each cell; only method 'em' takes samples")
    if not held_out.sum():
        raise ArgumentError("tables: there is no held-out sample")
    if not target.sum():
        raise ArgumentError("cells: there is no sample of the target")
    return held_out, target


@dataclass(frozen=True)
class _Cells:
    """Outcome cells of the held-out classes, `(classes, cells)`, and of the target, `(cells,)`."""

    # Classes without a sample are left out. `profiles` are the `raw` shares with one sample more that is spread as all
    # classes together, so that no share is 0.

    raw: FloatArray
    profiles: FloatArray
    shares: FloatArray
    sizes: FloatArray
    samples: float

    @classmethod
    def of(cls, tables: FloatArray, cells: FloatArray, bins: int) -> "_Cells":
        starts = _starts(tables.sum(axis=0) + cells, bins)
        tables, cells = np.add.reduceat(tables, starts, axis=1), np.add.reduceat(cells, starts)
        known = tables.sum(axis=0)
        stray = (known == 0) & (cells < _LEAST_IN_A_CELL)  # a few that only the target has: no evidence, so not apart
        rarest = np.flatnonzero(known)[np.argmin(known[known > 0])]
        cells[rarest] += cells[stray].sum()
        tables, cells = tables[:, ~stray], cells[~stray]
        sizes = tables.sum(axis=1, keepdims=True)
        pooled = tables.sum(axis=0) + cells  # with the target's, so that a cell of its own is possible at all
        profiles = (tables + pooled / pooled.sum()) / (sizes + 1)
        return cls(tables / sizes, profiles, cells / cells.sum(), sizes[:, 0], float(cells.sum()))

    def noise(self, mix: FloatArray) -> FloatArray:
        """Covariance of `shares - mix @ profiles`, shape `(cells, cells)`; both samples are random."""
        spread = _multinomial(mix @ self.profiles) / self.samples
        for share, profile, size in zip(mix, self.profiles, self.sizes, strict=True):
            counts = profile * size + UNSEEN
            spread += share**2 / size * counts.sum() / size * _multinomial(counts / counts.sum())
        return spread


def _multinomial(shares: FloatArray) -> FloatArray:
    return np.diag(shares) - np.outer(shares, shares)


def _starts(totals: FloatArray, bins: int) -> list[int]:
    """First cells of the groups into which neighbouring bins of a predicted class are joined: thirty samples each."""
    starts: list[int] = []
    for first in range(0, len(totals), bins):
        opened, inside = [first], 0.0
        for cell in range(first, first + bins):
            if inside >= _LEAST_IN_A_CELL:
                opened.append(cell)
                inside = 0.0
            inside += totals[cell]
        if inside < _LEAST_IN_A_CELL and len(opened) > 1:
            opened.pop()
        starts += opened
    return starts


def _nearest(differences: FloatArray, prior: FloatArray) -> FloatArray:
    """Return the mix q on the simplex with the least `|differences @ q|`; near `prior` where several are equal."""
    # On the ray of a mix, the least of |D t q|^2 + (1 - t)^2 grows with |D q|: so that least over t q >= 0, which NNLS
    # finds, lies on the ray of the solution.
    size = np.sqrt((differences**2).sum(axis=0).mean()) or 1.0
    tie = 1e-5 * (np.eye(len(prior)) - prior[:, None])
    ray, _ = nnls(
        np.vstack([differences / size, tie, np.ones(len(prior))]),
        np.append(np.zeros(len(differences) + len(prior)), 1.0),
    )
    mix: FloatArray = ray / ray.sum()
    return mix


def _by_generalised_least_squares(cells: _Cells) -> tuple[FloatArray, FloatArray]:
    mix = np.full(len(cells.profiles), 1 / len(cells.profiles))
    prior = cells.sizes / cells.sizes.sum()
    differences = (cells.shares - cells.profiles).T[:-1]
    for _ in range(_REWEIGHTINGS):
        root = cholesky(cells.noise(mix)[:-1, :-1], lower=True)
        mix = _nearest(solve_triangular(root, differences, lower=True), prior)
    weight = np.zeros((len(cells.shares),) * 2)
    weight[:-1, :-1] = cho_solve(cho_factor(cells.noise(mix)[:-1, :-1]), np.eye(len(weight) - 1))
    return mix, weight


def _by_least_squares(cells: _Cells) -> tuple[FloatArray, FloatArray]:
    prior = cells.sizes / cells.sizes.sum()
    return _nearest((cells.shares - cells.raw).T, prior), np.eye(len(cells.shares))


def _by_likelihood(cells: _Cells) -> tuple[FloatArray, FloatArray]:
    mix = _expectation_maximisation(cells.profiles.T, cells.shares)
    return mix, np.diag(1 / (mix @ cells.profiles))


_SOLVERS = {
    "gls": _by_generalised_least_squares,
    "bbse": _by_least_squares,
    "em-cells": _by_likelihood,
    "em": _by_likelihood,
}


def _expectation_maximisation(likelihoods: FloatArray, shares: FloatArray) -> FloatArray:
    """Return the mix of the greatest likelihood: rows are outcomes, columns classes; `shares` has each row's share."""
    mix = np.full(likelihoods.shape[1], 1 / likelihoods.shape[1])
    for _ in range(_STEPS):
        before = mix
        mix = mix * (likelihoods.T @ (shares / (likelihoods @ mix)))
        mix /= mix.sum()
        if np.abs(mix - before).sum() < _TOLERANCE:
            break
    mix[mix < _NONE] = 0.0
    likeliest: FloatArray = mix / mix.sum()
    return likeliest


def _covariance(information: FloatArray, spread: FloatArray, free: NDArray[np.bool_]) -> FloatArray:
    """Covariance of the mix, to first order, where only some classes are free to move and the sum stays 1."""
    # `information` is the score's derivative by the mix, `spread` its covariance.
    basis = np.zeros((len(information), max(0, free.sum() - 1)))
    basis[free] = null_space(np.ones((1, free.sum())))
    values, vectors = np.linalg.eigh(basis.T @ information @ basis)
    known = values > 1e-9 * np.abs(information).max()
    known_basis, blind = basis @ vectors[:, known], basis @ vectors[:, ~known]
    inverse = known_basis / values[known] @ known_basis.T
    whole = inverse @ spread @ inverse + _NOTHING_KNOWN * blind @ blind.T
    sizes, axes = np.linalg.eigh(whole)
    covariance: FloatArray = axes * sizes.clip(0.0, _NOTHING_KNOWN) @ axes.T
    return covariance


def _fit(mix: FloatArray, cells: _Cells, noise: FloatArray) -> tuple[float, int, float, float]:
    """Return the statistic, its degrees of freedom, the p-value and the excess of an estimate."""
    residual = cells.shares - mix @ cells.profiles
    dof = max(0, len(residual) - int(np.count_nonzero(mix)))
    chance = np.sqrt(2 / np.pi * np.diag(noise)).sum() / 2
    excess = float(np.abs(residual).sum() / 2 - chance)
    if not dof:
        return 0.0, 0, np.nan, excess
    statistic = float(residual[:-1] @ cho_solve(cho_factor(noise[:-1, :-1]), residual[:-1]))
    return statistic, dof, float(chdtrc(dof, statistic)), excess
