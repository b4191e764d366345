"""The dual of FedPALS's programme, which has one unknown for each class, however many clients there are.

Write a_i = p_i x_i, where p_i are any positive shares of sum 1 (FedAvg's weights, or equal ones). Then x = 1 stands for
these shares, and client sizes of very different magnitude cause no rounding problems. For any t of sum 1, offsets y0
and a curvature k > 0,

    min over x >= 0, sum_i p_i x_i = 1   ||t - sum_i p_i x_i S_i||^2 / (2k) + sum_i p_i (x_i - y0_i)^2 / 2

has the solution x_i = max(0, y0_i + S_i.v), where v in R^classes maximises the concave, piecewise quadratic

    t.v - k/2 ||v - mean(v)||^2 - 1/2 sum_i p_i max(0, y0_i + S_i.v)^2 .

(The multiplier of sum a = 1 is mean(v), because every S_i sums to 1.) With a limit L on every a_i, x_i is cut off at
u_i = L / p_i too, and max(0, y)^2 / 2 becomes u_i y - u_i^2 / 2 from y = u_i on. A few Newton steps with a line search
suffice; a step costs one pass over the clients and one Gram matrix of the clients with 0 < x_i < u_i.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError

FloatArray: TypeAlias = NDArray[np.float64]

ROWS_AT_ONCE = 4096
ROUNDING = 1e-14
"""Sums of shares over many clients up to this size count as zero."""

MOST_STEPS = 2000
PATIENCE = 300
"""Limits of an ascent: number of Newton steps, and of successive steps that do not reduce the gradient's maximum."""

ILL_CONDITIONED = 1e-11
"""A Gram matrix with a smaller ratio of smallest to largest eigenvalue is replaced by a factor of its square root."""


class Mixes:
    """The clients' label marginals S, `(clients, classes)`, stored as label counts.

    Attributes:
        present: Mask of the clients with label counts and a size above 0, `(clients,)`. All others get weight 0.
        samples: Sum of the present clients' sizes.
        shares: FedAvg's weights, `(clients,)`; 0 for a client that is not present.
        classes: Number of classes.
        limit: Upper limit on a client's weight; infinity: there is none. Present clients can meet it.

    Raises:
        ArgumentError: No client is present.
    """

    def __init__(self, counts: FloatArray, sizes: FloatArray | None = None, limit: float = np.inf) -> None:
        totals = counts.sum(axis=1)
        held = totals if sizes is None else sizes
        self.present = (totals > 0) & (held > 0)
        if not self.present.any():
            raise ArgumentError("counts: no client holds a sample")
        self.samples = float(held[self.present].sum())
        self.shares = np.where(self.present, held, 0.0) / self.samples
        self.classes = int(counts.shape[1])
        self.limit = limit
        self._counts = np.ascontiguousarray(counts)
        self._inverse = np.divide(1.0, totals, out=np.zeros_like(totals), where=self.present)

    def upper(self, shares: FloatArray) -> FloatArray | None:
        """Compute the upper bounds of x for shares p, `(clients,)`; None if there is no limit."""
        if self.limit == np.inf:
            return None
        return np.divide(self.limit, shares, out=np.full_like(shares, np.inf), where=shares > 0)

    def scores(self, direction: FloatArray) -> FloatArray:
        """Compute each marginal's inner product with a direction, `(clients,)`; 0 for clients that are not present."""
        scores: FloatArray = (self._counts @ direction) * self._inverse
        return scores

    def mean(self, weights: FloatArray) -> FloatArray:
        """Compute the label mix of weighted clients, `sum_i a_i S_i`, `(classes,)`."""
        mean: FloatArray = (weights * self._inverse) @ self._counts
        return mean

    def rows(self, ids: NDArray[np.int64], scale: FloatArray | None = None) -> FloatArray:
        """Return the marginals of the clients `ids`, each multiplied by the client's entry of `scale`."""
        factor = self._inverse[ids] if scale is None else self._inverse[ids] * scale[ids]
        rows: FloatArray = self._counts[ids] * factor[:, None]
        return rows


def ascend(
    mixes: Mixes, shares: FloatArray, curvature: float, activity: FloatArray, target: FloatArray, start: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Maximise the dual.

    Args:
        mixes: The clients' marginals S.
        shares: The shares p, `(clients,)`.
        curvature: The curvature k.
        activity: y0 + S v at the start, `(clients,)`. Steps update it instead of computing it anew, because S v loses
            digits if v is large.
        target: The vector t, `(classes,)`.
        start: Initial v, `(classes,)`.

    Returns:
        v, `(classes,)`, and y0 + S v, `(clients,)`; the latter, `cut` to its bounds, is x.
    """
    v, y, upper = start, activity, mixes.upper(shares)
    least, since = np.inf, 0
    for _ in range(MOST_STEPS):
        gradient = target - curvature * centred(v) - mixes.mean(shares * cut(y, upper))
        size = float(np.abs(gradient).max())
        since = 0 if size < least else since + 1
        least = min(least, size)
        if size <= ROUNDING / 10 or since >= (2 if size <= ROUNDING else PATIENCE):
            break
        free = y > 0 if upper is None else (y > 0) & (y < upper)
        step = _newton_step(mixes, np.where(free, shares, 0.0), curvature, gradient)
        change = mixes.scores(step)
        linear = float(step @ (target - curvature * centred(v)))
        length = _line_search(shares, y, change, linear, curvature * float(centred(step) @ centred(step)), upper)
        v = v + length * step
        y = y + length * change
    return v, y


def _newton_step(mixes: Mixes, scale: FloatArray, curvature: float, gradient: FloatArray) -> FloatArray:
    """Solve H step = gradient, with H = sum of scale_i S_i S_i^T + curvature (I - 1 1^T / classes).

    A well-conditioned H is used as it is. Otherwise a QR factor of its square root is used, which keeps twice as many
    digits: with client sizes from 1 to a million, H itself has no correct digits left. A curvature above 1 is scaled
    away first, since it would hide the direction (1, ..., 1), which has no curvature.
    """
    active = np.flatnonzero(scale)
    if not len(active):
        total = float(gradient.sum())  # all x at a bound: move them up or down together, or apart if their sum is right
        return np.full_like(gradient, np.sign(total)) if abs(total) > ROUNDING else centred(gradient) / curvature
    roots = np.sqrt(scale)
    mean = np.full((mixes.classes, mixes.classes), 1 / mixes.classes)
    centring = np.eye(mixes.classes) - mean
    scaling = centring / np.sqrt(max(1.0, curvature)) + mean
    ridge = np.sqrt(min(1.0, curvature)) * centring
    blocks = [active[first : first + ROWS_AT_ONCE] for first in range(0, len(active), ROWS_AT_ONCE)]
    if len(active) > 2 * mixes.classes:
        gram = np.zeros_like(mean)
        for block in blocks:
            rows = mixes.rows(block, roots)
            gram += rows.T @ rows
        values, vectors = np.linalg.eigh(scaling @ gram @ scaling + ridge @ ridge)
        if values[0] > ILL_CONDITIONED * values[-1]:
            step: FloatArray = scaling @ vectors @ ((vectors.T @ scaling @ gradient) / values)
            return step
    factor = ridge
    for block in blocks:
        factor = np.vstack([factor, mixes.rows(block, roots) @ scaling])
        if len(blocks) > 1:
            factor = np.linalg.qr(factor, mode="r")
    _, singular, transposed = np.linalg.svd(factor, full_matrices=False)
    squared = np.where(singular > 1e-15 * singular[0], singular**2, np.inf)
    fallback: FloatArray = scaling @ transposed.T @ ((transposed @ scaling @ gradient) / squared)
    return fallback


def _line_search(
    shares: FloatArray, y: FloatArray, change: FloatArray, linear: float, bend: float, upper: FloatArray | None
) -> float:
    """Find a step length at which the dual's slope is at most a tenth of its slope at 0; 1 is tried first."""

    def slope(length: float) -> float:
        return linear - length * bend - float(shares @ (cut(y + length * change, upper) * change))

    first = slope(0.0)
    length, low, high = 1.0, 0.0, np.inf
    if first <= 0:
        return length
    for _ in range(60):
        here = slope(length)
        if abs(here) <= 0.1 * first:
            break
        low, high = (length, high) if here > 0 else (low, length)
        there = y + length * change
        free = there > 0 if upper is None else (there > 0) & (there < upper)
        curvature = bend + float(shares @ np.where(free, change**2, 0.0))
        length = length + here / curvature if curvature > 0 else np.inf
        if not low < length < high:
            length = 2 * low + 1 if high == np.inf else (low + high) / 2
    return length


def cut(y: FloatArray, upper: FloatArray | None) -> FloatArray:
    """Cut y to its bounds: at 0, and at `upper` if there is a limit."""
    x: FloatArray = np.maximum(y, 0.0)
    return x if upper is None else np.minimum(x, upper)


def centred(v: FloatArray) -> FloatArray:
    """Subtract the mean of a vector from its entries."""
    difference: FloatArray = v - v.sum() / len(v)
    return difference


def normalised(weights: FloatArray) -> FloatArray:
    """Divide weights by their sum."""
    scaled: FloatArray = weights / weights.sum()
    return scaled
