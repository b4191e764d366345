"""Probabilities that can be believed: a model's logits calibrated on held-out data, then moved to another label mix.

    p(y | x) = softmax(z / T + b)        on held-out data, each class with the same total weight (uniform prior)
    p_target(y | x) ~ p(y | x) q_y / prior_y

A client's own prior q is its label counts, half a sample of each class added; `prior` is then the held-out samples'.
A model that was trained across clients whose labels differ prefers some classes; one temperature can't mend that, a
bias for each class can. Source: Alexandari, Kundaje, Shrikumar, "Maximum Likelihood with Bias-Corrected Calibration is
Hard-To-Beat at Label Shift Adaptation", ICML 2020 (BCTS); Saerens, Latinne, Decaestecker, Neural Computation 2002.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, softmax

from fedskew.errors import ArgumentError
from fedskew.labels._counts import FloatArray, as_amounts, as_floats, as_target
from fedskew.labels._outcomes import NEVER

_STEPS = 100
_TOLERANCE = 1e-12
_HALVINGS = 40


@dataclass(frozen=True)
class Calibration:
    """One temperature and a bias for each class: `softmax(logits / temperature + biases)`.

    Attributes:
        temperature: Above 1 the logits were too sure, below 1 not sure enough; infinite where they say nothing of the
            class, or the wrong thing.
        biases: Shape `(classes,)`, mean 0 over the classes with held-out samples; -inf for the others, whose
            probability is 0.
    """

    temperature: float
    biases: FloatArray

    def apply(self, logits: ArrayLike) -> FloatArray:
        """Probabilities of logits, `(samples, classes)`, for a uniform mix of the classes with held-out samples."""
        raw = _logits(logits, "logits")
        if raw.shape[1] != len(self.biases):
            raise ArgumentError(f"logits: must have {len(self.biases)} columns, one for each class, not {raw.shape[1]}")
        probabilities: FloatArray = softmax(raw / self.temperature + self.biases, axis=1)
        return probabilities

    def offsets(self, mix: FloatArray, prior: FloatArray | None = None) -> FloatArray:
        """What is added to `logits / temperature` for a label mix: `biases + log(mix) - log(prior)`, `(classes,)`.

        `prior` is the mix that `biases` are for; None: uniform. `NEVER` for a class that lacks a share of either, or a
        held-out sample.
        """
        odds = mix if prior is None else np.divide(mix, prior, out=np.zeros(len(mix)), where=prior > 0)
        added = np.maximum(self.biases + np.log(odds, out=np.full(len(odds), -np.inf), where=odds > 0), NEVER)
        if (added == NEVER).all():
            raise ArgumentError("mix: no held-out sample is of a class that it has a share of")
        return added

    @classmethod
    def of_sums(
        cls,
        ask: Callable[[float, FloatArray], CalibrationSums],
        weights: ArrayLike,
        spread: float,
        most: int = _STEPS * _HALVINGS,
    ) -> Calibration:
        """Find a calibration from sums alone, by damped Newton steps on a convex loss; 5 to 10 questions as a rule.

        `ask` gives the sums over all holders' samples (`CalibrationSums.of`) at a slope and biases, `weights` are the
        total weights of each class's samples, and `spread` (`CalibrationSums.spread_of`) only helps the steps. After
        `most` questions the best point so far is taken.
        """
        amounts = as_floats(weights, "weights")
        held = np.flatnonzero(amounts)
        if len(held) < 2:
            raise ArgumentError(f"targets: to calibrate takes samples of at least two classes, not of {len(held)}")
        slope, biases = _fitted(ask, amounts, max(spread, 1e-12), most)
        whole = np.full(len(amounts), -np.inf)
        whole[held] = biases[held] - biases[held].mean()
        return cls(1 / slope if slope > 0 else np.inf, whole)


def calibrate(logits: ArrayLike, targets: ArrayLike, weights: ArrayLike | None = None) -> Calibration:
    """Find the temperature and biases with the greatest likelihood on held-out logits, `(samples, classes)`.

    Where `weights`, `(samples,)`, is None, all classes with a sample weigh the same, so that the calibrated
    probabilities have a uniform prior.

    Example:
        >>> logits = [[2.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> calibrate(logits, [0, 0, 1, 1, 1]).apply(logits).sum(axis=1).round(6).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    raw = _logits(logits, "logits")
    wanted = as_amounts(targets, "targets", (len(raw),), "a class for each sample")
    classes = raw.shape[1]
    if (odd := wanted[~np.isin(wanted, np.arange(classes))]).size:
        raise ArgumentError(f"targets: must be classes from 0 to {classes - 1}, not {odd[0]:g}")
    labels = wanted.astype(int)
    if weights is None:
        amounts = 1 / np.bincount(labels, minlength=classes)[labels]
    else:
        amounts = as_amounts(weights, "weights", wanted.shape, "one for each sample")
    kept = amounts > 0
    some, labels, shares = raw[kept], labels[kept], amounts[kept] / amounts.sum()
    by_class = np.bincount(labels, shares, minlength=classes)

    def sums(slope: float, biases: FloatArray) -> CalibrationSums:
        return CalibrationSums.of(some, labels, slope, biases, shares)

    return Calibration.of_sums(sums, by_class, CalibrationSums.spread_of(some))


class CalibrationSums(NamedTuple):
    """A holder's part of the sums by which a calibration is found: the weighted cross-entropies, their first and second
    derivatives for the slope and the biases."""

    loss: float
    gradient: FloatArray
    curvature: FloatArray

    @classmethod
    def of(
        cls, logits: FloatArray, targets: NDArray[np.int64], slope: float, biases: FloatArray, weights: FloatArray
    ) -> CalibrationSums:
        """Compute loss, gradient and curvature of `softmax(slope * logits + biases)` on some samples.

        Sums of several holders' samples are the sums of what each of them computes.

        `biases` are -inf for a class that nobody has a sample of, finite for those of `targets`.
        """
        held = np.isfinite(biases)
        inputs = _centred(logits, held)
        rows, places = np.arange(len(inputs)), np.searchsorted(np.flatnonzero(held), targets)
        outputs = slope * inputs + biases[held]
        loss = float(weights @ (logsumexp(outputs, axis=1) - outputs[rows, places])) if len(rows) else 0.0
        shares = softmax(outputs, axis=1)
        errors = shares.copy()
        errors[rows, places] -= 1
        weighted = weights[:, None] * shares
        means = (shares * inputs).sum(axis=1)
        among = np.append(0, 1 + np.flatnonzero(held))
        gradient, curvature = np.zeros(len(biases) + 1), np.zeros((len(biases) + 1,) * 2)
        gradient[among] = np.append(weights @ (errors * inputs).sum(axis=1), weights @ errors)
        inner = np.empty((len(among),) * 2)
        inner[0, 0] = weights @ ((shares * inputs**2).sum(axis=1) - means**2)
        inner[0, 1:] = inner[1:, 0] = (weighted * (inputs - means[:, None])).sum(axis=0)
        inner[1:, 1:] = np.diag(weighted.sum(axis=0)) - weighted.T @ shares
        curvature[np.ix_(among, among)] = inner
        return cls(loss, gradient, curvature)

    @staticmethod
    def spread_of(logits: FloatArray) -> float:
        """Return the root mean square of the logits' differences from their sample's mean; 0 of no sample."""
        centred = _centred(logits, np.ones(logits.shape[1], dtype=bool))
        return float(np.sqrt(np.square(centred).mean())) if len(centred) else 0.0


def _fitted(
    ask: Callable[[float, FloatArray], CalibrationSums], weights: FloatArray, spread: float, most: int
) -> tuple[float, FloatArray]:
    """Return the slope 1/T and the biases. The curvature is singular along equal biases."""
    scale = np.append(1 / spread, np.ones(len(weights)))  # so that both are of one size
    none = np.where(weights > 0, 0.0, -np.inf)
    found = np.append(spread, np.zeros(len(weights)))

    def at(point: FloatArray) -> CalibrationSums:
        return ask(float(point[0]) / spread, point[1:] + none)

    now, left = at(found), most - 1
    for _ in range(_STEPS):
        gradient, curvature = scale * now.gradient, scale[:, None] * now.curvature * scale
        step = np.linalg.lstsq(curvature, gradient, rcond=1e-12)[0]
        decrease = gradient @ step
        if decrease < _TOLERANCE:
            break
        for length in 0.5 ** np.arange(min(_HALVINGS, left)):
            left -= 1
            tried = at(found - length * step)
            if tried.loss <= now.loss - 0.1 * length * decrease:
                break
        else:
            break
        found, now = found - length * step, tried
    if found[0] <= 0:
        return 0.0, np.log(weights, out=np.zeros(len(weights)), where=weights > 0)
    return float(found[0]) / spread, found[1:]


def _centred(logits: FloatArray, held: NDArray[np.bool_]) -> FloatArray:
    """Return the logits of the classes with a sample, each row with mean 0."""
    inputs = logits[:, held]
    centred: FloatArray = inputs - inputs.mean(axis=1, keepdims=True)
    return centred


def adapt(probabilities: ArrayLike, prior: ArrayLike, mix: ArrayLike) -> FloatArray:
    """Probabilities under another label mix: each class times `mix / prior`, then every row divided by its sum.

    Example:
        >>> adapt([[0.5, 0.5]], prior=[0.5, 0.5], mix=[0.9, 0.1]).round(2).tolist()
        [[0.9, 0.1]]
    """
    shares = as_amounts(probabilities, "probabilities", ("samples", "classes"))
    before, after = as_target(prior, shares.shape[1], "prior"), as_target(mix, shares.shape[1], "mix")
    lacking = np.flatnonzero((before == 0) & (after > 0))
    if len(lacking):
        raise ArgumentError(f"mix: class {lacking[0]} has a share, but none in prior, so its probability is not known")
    moved = shares * np.divide(after, before, out=np.zeros_like(after), where=before > 0)
    sums = moved.sum(axis=1, keepdims=True)
    if not sums.all():
        raise ArgumentError(f"probabilities: row {np.flatnonzero(sums == 0)[0]} has no class that mix has a share of")
    adapted: FloatArray = moved / sums
    return adapted


def personal(logits: ArrayLike, calibration: Calibration, held_out_mix: ArrayLike, counts: ArrayLike) -> FloatArray:
    """Probabilities for one client: `softmax(logits / temperature + biases + log(own) - log(held_out_mix))`.

    A class without a held-out sample has probability 0 even where the client has samples of it: nothing says how large
    its logits should be.

    Args:
        logits: Of the common model, `(samples, classes)`.
        calibration: Of these logits, from held-out samples of all clients.
        held_out_mix: The mix that the calibrated probabilities are for, `(classes,)`: the held-out samples' where each
            weighed the same (`calibrate(..., weights=ones)`), uniform where each class did.
        counts: The client's samples of each class, `(classes,)`; `own` is its mix with half a sample more of each.

    Example:
        >>> calibration = Calibration(1.0, np.zeros(2))
        >>> personal([[0.0, 0.0]], calibration, held_out_mix=[0.5, 0.5], counts=[8, 0]).round(3).tolist()
        [[0.944, 0.056]]
    """
    classes = len(calibration.biases)
    added = calibration.offsets(own_mix(counts, classes), as_target(held_out_mix, classes, "held_out_mix"))
    return replace(calibration, biases=added).apply(logits)


def own_mix(counts: ArrayLike, classes: int) -> FloatArray:
    """Return a client's label mix, `(classes,)`, of its samples of each class and half a one more."""
    smoothed = as_amounts(counts, "counts", (classes,), "one number for each class") + 0.5
    mix: FloatArray = smoothed / smoothed.sum()
    return mix


def _logits(logits: ArrayLike, name: str) -> FloatArray:
    raw = as_floats(logits, name)
    if raw.ndim != 2 or not raw.size:
        raise ArgumentError(f"{name}: must have the shape (samples, classes), not {raw.shape}")
    if not np.isfinite(raw).all():
        row, column = np.argwhere(~np.isfinite(raw))[0]
        raise ArgumentError(f"{name}: every number must be finite, but {name}[{row}, {column}] is {raw[row, column]}")
    return raw
