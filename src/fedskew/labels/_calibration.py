"""Probabilities that can be believed: a model's logits calibrated on held-out data, then moved to another label mix.

    p(y | x) = softmax(z / T + b)        on held-out data, each class with the same total weight (uniform prior)
    p_target(y | x) ~ p(y | x) q_y / prior_y

A model that was trained across clients whose labels differ prefers some classes; one temperature can't mend that, a
bias for each class can. Source: Alexandari, Kundaje, Shrikumar, "Maximum Likelihood with Bias-Corrected Calibration is
Hard-To-Beat at Label Shift Adaptation", ICML 2020 (BCTS); Saerens, Latinne, Decaestecker, Neural Computation 2002.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp, softmax

from fedskew.errors import ArgumentError
from fedskew.labels._counts import FloatArray, as_floats, as_target, check_amounts

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
        """Calibrated probabilities, for a label mix that is uniform over the classes with held-out samples.

        Args:
            logits: Raw outputs, shape `(samples, classes)`.

        Returns:
            Probabilities of the same shape; rows sum to 1.

        Raises:
            ArgumentError: Another shape, NaN or infinite.
        """
        raw = _logits(logits, "logits")
        if raw.shape[1] != len(self.biases):
            raise ArgumentError(f"logits: must have {len(self.biases)} columns, one for each class, not {raw.shape[1]}")
        probabilities: FloatArray = softmax(raw / self.temperature + self.biases, axis=1)
        return probabilities


def calibrate(logits: ArrayLike, targets: ArrayLike, weights: ArrayLike | None = None) -> Calibration:
    """Find the temperature and biases with the greatest likelihood on held-out data, by Newton steps.

    Args:
        logits: Raw outputs on samples that the model was not trained on, shape `(samples, classes)`.
        targets: Their classes, shape `(samples,)`.
        weights: Of each sample, shape `(samples,)`; where None, all classes with a sample weigh the same, so that the
            calibrated probabilities have a uniform prior.

    Returns:
        The calibration.

    Raises:
        ArgumentError: Shapes that don't fit, NaN, a class that there is no column for, or fewer than two classes.

    Example:
        >>> logits = [[2.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
        >>> calibrate(logits, [0, 0, 1, 1, 1]).apply(logits).sum(axis=1).round(6).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    raw = _logits(logits, "logits")
    wanted = as_floats(targets, "targets")
    classes = raw.shape[1]
    if wanted.shape != (len(raw),):
        raise ArgumentError(f"targets: must have the shape ({len(raw)},), a class for each sample, not {wanted.shape}")
    if not np.isin(wanted, np.arange(classes)).all():
        odd = wanted[~np.isin(wanted, np.arange(classes))][0]
        raise ArgumentError(f"targets: must be classes from 0 to {classes - 1}, not {odd:g}")
    sizes = np.bincount(wanted.astype(int), minlength=classes)
    if weights is None:
        amounts = 1 / sizes[wanted.astype(int)]
    else:
        amounts = as_floats(weights, "weights")
        if amounts.shape != wanted.shape:
            raise ArgumentError(
                f"weights: must have the shape {wanted.shape}, one for each sample, not {amounts.shape}"
            )
        check_amounts(amounts, "weights")
        sizes = np.bincount(wanted.astype(int), amounts, minlength=classes)
    held = np.flatnonzero(sizes)
    if len(held) < 2:
        raise ArgumentError(f"targets: to calibrate takes samples of at least two classes, not of {len(held)}")
    kept = amounts > 0
    places = np.searchsorted(held, wanted[kept].astype(int))
    slope, biases = _fitted(raw[kept][:, held], places, amounts[kept] / amounts.sum())
    whole = np.full(classes, -np.inf)
    whole[held] = biases - biases.mean()
    return Calibration(1 / slope if slope > 0 else np.inf, whole)


def _fitted(logits: FloatArray, targets: np.ndarray, weights: FloatArray) -> tuple[float, FloatArray]:
    """The slope 1/T and the biases; damped Newton on a convex loss, whose curvature is singular along equal biases."""
    spread = max(float(logits.std()), 1e-12)
    inputs = (logits - logits.mean(axis=1, keepdims=True)) / spread
    rows = np.arange(len(inputs))
    found = np.zeros(inputs.shape[1] + 1)
    found[0] = spread

    def loss(point: FloatArray) -> float:
        outputs = point[0] * inputs + point[1:]
        return float(weights @ (logsumexp(outputs, axis=1) - outputs[rows, targets]))

    value = loss(found)
    for _ in range(_STEPS):
        shares = softmax(found[0] * inputs + found[1:], axis=1)
        errors = shares.copy()
        errors[rows, targets] -= 1
        weighted = weights[:, None] * shares
        means = (shares * inputs).sum(axis=1)
        gradient = np.append((weights * (errors * inputs).sum(axis=1)).sum(), weights @ errors)
        curvature = np.empty((len(found),) * 2)
        curvature[0, 0] = weights @ ((shares * inputs**2).sum(axis=1) - means**2)
        curvature[0, 1:] = curvature[1:, 0] = (weighted * (inputs - means[:, None])).sum(axis=0)
        curvature[1:, 1:] = np.diag(weighted.sum(axis=0)) - weighted.T @ shares
        step = np.linalg.lstsq(curvature, gradient, rcond=1e-12)[0]
        decrease = gradient @ step
        length = next(
            (
                scale
                for scale in 0.5 ** np.arange(_HALVINGS)
                if loss(found - scale * step) <= value - 0.1 * scale * decrease
            ),
            0.0,
        )
        if decrease < _TOLERANCE or not length:
            break
        found = found - length * step
        value = loss(found)
    if found[0] <= 0:
        return 0.0, np.log(np.bincount(targets, weights))
    return float(found[0]) / spread, found[1:]


def adapt(probabilities: ArrayLike, prior: ArrayLike, mix: ArrayLike) -> FloatArray:
    """Probabilities under another label mix: each class times `mix / prior`, then every row divided by its sum.

    Args:
        probabilities: Shape `(samples, classes)`, calibrated for `prior`.
        prior: Label mix that they are calibrated for, shape `(classes,)`.
        mix: Label mix of the target, shape `(classes,)`.

    Returns:
        Probabilities of the same shape; rows sum to 1.

    Raises:
        ArgumentError: Shapes that don't fit, NaN, negative numbers, a class of `mix` that `prior` lacks, or a sample
            whose every class has probability 0.

    Example:
        >>> adapt([[0.5, 0.5]], prior=[0.5, 0.5], mix=[0.9, 0.1]).round(2).tolist()
        [[0.9, 0.1]]
    """
    shares = as_floats(probabilities, "probabilities")
    if shares.ndim != 2 or not shares.shape[1]:
        raise ArgumentError(f"probabilities: must have the shape (samples, classes), not {shares.shape}")
    check_amounts(shares, "probabilities")
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


def _logits(logits: ArrayLike, name: str) -> FloatArray:
    raw = as_floats(logits, name)
    if raw.ndim != 2 or not raw.size:
        raise ArgumentError(f"{name}: must have the shape (samples, classes), not {raw.shape}")
    if not np.isfinite(raw).all():
        row, column = np.argwhere(~np.isfinite(raw))[0]
        raise ArgumentError(f"{name}: every number must be finite, but {name}[{row}, {column}] is {raw[row, column]}")
    return raw
