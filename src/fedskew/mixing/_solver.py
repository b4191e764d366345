"""The solver of FedPALS's programme; see the package's docstring.

Write a_i = p_i x_i, where p_i are positive shares of sum 1 (FedAvg's weights, or equal ones): client sizes of very
different magnitude then cause no rounding problems. For any t of sum 1, offsets y0 and a curvature k > 0,

    min over x >= 0, sum_i p_i x_i = 1   ||t - sum_i p_i x_i S_i||^2 / (2k) + sum_i p_i (x_i - y0_i)^2 / 2

has the solution x_i = max(0, y0_i + S_i.v), where v in R^classes maximises the concave, piecewise quadratic

    t.v - k/2 ||v - mean(v)||^2 - 1/2 sum_i p_i max(0, y0_i + S_i.v)^2 .

(The multiplier of sum a = 1 is mean(v), because every S_i sums to 1.) With a limit L on every a_i, x_i is cut off at
L / p_i too. A few Newton steps with a line search find v; a step costs one pass over the clients and one Gram matrix.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError

FloatArray: TypeAlias = NDArray[np.float64]

ROUNDING = 1e-14
"""Sums of shares over many clients up to this size count as zero."""

# Weights at kappa differ from those at infinity by 1.5 / kappa at most, relatively. Of a larger kappa Newton steps have
# too few digits: from 1e12 on where weights have an upper limit, from 1e15 on without one.
DIRECT, FINEST, INFINITE = 1e-6, 1e-20, 1e11
"""The least kappa that is solved without the projection, the least of all (below: the limit 0), and infinity."""

ON_FACE, IN_HULL = 1e-12, 1e-10
"""Slacks up to this size are those of the face with the projection, and a residual up to this size is none."""

REACHED = 1e-9
"""Relative accuracy of the kappa that `Programme.kappa` finds."""

ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Solution:
    """FedPALS's weights with certificates of their optimality, for the programme scaled to mean size 1.

    `gap` and `kkt` are divided by max(1, strength / samples). At strength 0 each is the larger of two values: one for
    the distance to the target, and one for the spread `sum a^2 / n` among the weights of smallest distance, relative to
    the spread.

    Attributes:
        weights: Client weights, shape `(clients,)`, sum 1.
        gap: Upper bound on how much the objective at the weights exceeds the minimum.
        kkt: Largest violation of stationarity: by how much the partial derivative of a client with weight differs from
            the multiplier, or that of a client without weight lies below it.
        ess: Effective sample size, in samples.
        distance: Squared distance of the weighted mix from the target, `||T - sum a_i S_i||^2`.
    """

    weights: FloatArray
    gap: float
    kkt: float
    ess: float
    distance: float


@dataclass(frozen=True)
class Projection:
    """The mix nearest to the target: weights that give it, `(clients,)`, target minus mix, `(classes,)`, by how much
    the squared distance may exceed the minimum (`gap`), and the largest violation of stationarity (`kkt`)."""

    weights: FloatArray
    residual: FloatArray
    gap: float
    kkt: float


class Programme:
    """FedPALS's programme for one round, with kappa = strength / samples as its only parameter.

    `sizes` are the row sums of `counts` unless given. Where the clients are too few for the limit on each weight, their
    weights are equal. ArgumentError: no client holds a sample. Nothing else is checked.
    """

    def __init__(
        self, counts: FloatArray, target: FloatArray, sizes: FloatArray | None = None, limit: float | None = None
    ) -> None:
        totals = counts.sum(axis=1)
        held = totals if sizes is None else sizes
        self._present = (totals > 0) & (held > 0)
        number = np.count_nonzero(self._present)
        if not number:
            raise ArgumentError("counts: no client holds a sample")
        self.target = target
        # From here on clients are those that can have weight.
        self._counts = np.ascontiguousarray(counts if number == len(counts) else counts[self._present])
        self._inverse, self._sizes = 1 / totals[self._present], held[self._present]
        self.samples = float(self._sizes.sum())
        self._shares = self._sizes / self.samples
        self._limit = np.inf if limit is None or limit >= 1 else max(limit, 1 / number)

    def solve(self, kappa: float) -> Solution:
        """Compute the optimal weights at kappa = strength / samples: below 1e-20 it is 0, from 1e11 on infinite."""
        if kappa >= INFINITE:
            weights, gap, kkt = self._level, 0.0, 0.0
        else:
            weights, gap, kkt = self._solve(kappa if kappa >= FINEST else 0.0)
        residual = self.target - self._mean(weights)
        ess = 1 / float(np.sum(weights**2 / self._sizes))
        return Solution(self._of_all(weights), gap, kkt, ess, float(residual @ residual))

    def kappa(self, share: float) -> float:
        """Find the smallest kappa at which the effective sample size is at least a share of all samples, from 0 to 1.

        It is infinite if only FedAvg's weights reach the share, or if a limit keeps all weights from it.
        """

        from scipy.optimize import brentq

        def above(logarithm: float) -> float:
            return math.log(self._share(math.exp(logarithm)) / share)

        missing = self.target - self._mean(self._level)
        distance = float(missing @ missing)
        if share == 0 or distance <= 1e-28:  # of rounding
            return 0.0
        most = 1.0 if self._limit == np.inf else self._share(math.inf)
        if share >= most or self._share(0.0) >= share * (1 - REACHED):
            return 0.0 if self._share(0.0) >= min(share, most) * (1 - REACHED) else math.inf
        # FedAvg's weights are feasible, so kappa (1 / share(kappa) - 1 / most) <= distance: here the share is reached.
        high = low = distance / (1 / share - 1 / most)
        while low > FINEST and self._share(low) >= share:
            high, low = low, low / 30
        if low <= FINEST or high == low:
            return high
        kappa = math.exp(brentq(above, math.log(low), math.log(high), xtol=REACHED / 4))
        return kappa if self._share(kappa) >= share else kappa * (1 + REACHED / 2)

    @cached_property
    def projection(self) -> Projection:
        """The projection of the target on the hull of the clients' mixes; computed once for all kappa."""
        found = self._nearest
        return Projection(self._of_all(found.weights), found.residual, found.gap, found.kkt)

    @cached_property
    def _nearest(self) -> Projection:
        return self._nearest_by_columns() if self._limit == np.inf else self._nearest_within_limit()

    @cached_property
    def _level(self) -> FloatArray:
        """The weights of largest effective sample size: FedAvg's, as far as the limit allows."""
        return limited(self._shares, min(self._limit, 1.0), self._sizes)

    def _share(self, kappa: float) -> float:
        return self.solve(kappa).ess / self.samples

    def _of_all(self, weights: FloatArray) -> FloatArray:
        whole: FloatArray = np.zeros(len(self._present))
        whole[self._present] = weights
        return whole

    def _scores(self, direction: FloatArray) -> FloatArray:
        """Each client's mix times a direction."""
        scores: FloatArray = (self._counts @ direction) * self._inverse
        return scores

    def _mean(self, weights: FloatArray) -> FloatArray:
        mean: FloatArray = (weights * self._inverse) @ self._counts
        return mean

    def _solve(self, kappa: float) -> tuple[FloatArray, float, float]:
        """Compute weights, gap and kkt."""
        # For a small kappa, x_i = max(0, slack_i / kappa + S_i.v), or the limit where that is smaller, with the label
        # mix T - r; at kappa 0 clients off the face have no weight, or that of the limit.
        residual, offset = np.zeros_like(self.target), np.zeros(len(self._shares))
        face = offset == 0
        if kappa < DIRECT:
            nearest = self._nearest
            if np.abs(nearest.residual).max() > IN_HULL:
                residual = nearest.residual
                slack = self._slack(nearest.weights, residual)
                face = np.abs(slack) <= max(ON_FACE, 10 * nearest.kkt)
                offset = np.where(face, 0.0, slack / kappa if kappa else np.copysign(np.inf, slack))
        weights, v = self._meet(offset, self.target - residual, kappa)
        if kappa:
            gradient = kappa * weights / self._shares - self._scores(self.target - self._mean(weights))
            gap, kkt = self._certificate(weights, 2 * gradient)
            return weights, gap / max(1.0, kappa), kkt / max(1.0, kappa)
        fit = self._projection(weights)
        x, y = weights / self._shares, self._scores(v)
        spread = float(self._shares[face] @ x[face] ** 2)
        gap, kkt = self._certificate(weights, np.where(face, x - y, 0.0), multiplier=0.0)
        return weights, max(fit.gap, 2 * gap / spread), max(fit.kkt, kkt / float(x.max()))

    def _meet(self, offset: FloatArray, mix: FloatArray, kappa: float) -> tuple[FloatArray, FloatArray]:
        """Find x_i = max(0, offset_i + S_i.v) with sum_i a_i S_i = mix - kappa (v - mean(v)), and v."""
        # At kappa 0 and offset 0 these are the weights of largest effective sample size that give the mix. Each step of
        # the method of multipliers solves a programme whose curvature `_ascend` can resolve, and adds what is missing
        # of the mix to the next step's target, until nothing is missing or nothing more can be gained.
        v, curvature, least = np.ones_like(mix), max(DIRECT, kappa), np.inf
        y, multiplier = offset + 1.0, np.zeros_like(mix)
        while True:
            v, y = self._ascend(self._shares, curvature, y, mix + (curvature - kappa) * multiplier, v)
            multiplier = v - v.mean()
            weights = self._shares * np.clip(y, 0.0, self._limit / self._shares)
            missing = float(np.abs(mix - kappa * multiplier - self._mean(weights)).max())
            if missing <= ROUNDING / 10 or curvature == kappa or (curvature <= FINEST and 2 * missing > least):
                return self._whole(weights), v
            if missing <= ON_FACE and 10 * missing > least:
                return self._whole(weights), v
            least, curvature = min(least, missing), max(curvature / 10, kappa, FINEST)

    def _ascend(
        self, shares: FloatArray, curvature: float, y: FloatArray, target: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Maximise the dual for shares p, a curvature k and a vector t: v and y0 + S v."""
        # Steps update y0 + S v instead of computing it anew, because S v loses digits if v is large.
        upper, least, since = self._limit / shares, np.inf, 0
        for _ in range(2000):
            centred = v - v.mean()
            gradient = target - curvature * centred - self._mean(shares * np.clip(y, 0.0, upper))
            size = float(np.abs(gradient).max())
            since = 0 if size < least else since + 1
            least = min(least, size)
            if size <= ROUNDING / 10 or since >= (2 if size <= ROUNDING else 300):
                break
            step = self._newton_step(np.where((y > 0) & (y < upper), shares, 0.0), curvature, gradient)
            change, across = self._scores(step), step - step.mean()
            linear, bend = float(step @ (target - curvature * centred)), curvature * float(across @ across)

            def slope(length: float) -> float:
                moved = np.clip(y + length * change, 0.0, upper)  # noqa: B023
                return linear - length * bend - float(shares @ (moved * change))  # noqa: B023

            length = _step_length(slope)
            v, y = v + length * step, y + length * change
        return v, y

    def _newton_step(self, scale: FloatArray, curvature: float, gradient: FloatArray) -> FloatArray:
        """Solve H step = gradient, with H = sum of scale_i S_i S_i^T + curvature (I - 1 1^T / classes)."""
        # A well-conditioned H is used as it is. Otherwise a QR factor of its square root is used, which keeps twice as
        # many digits: with client sizes from 1 to a million, H itself has no correct digits left. A curvature above 1
        # is scaled away first, since it would hide the direction (1, ..., 1), which has no curvature.
        classes, active = len(gradient), np.flatnonzero(scale)
        if not len(active):  # all x at a bound: move them up or down together, or apart if their sum is right
            total = float(gradient.sum())
            apart: FloatArray = (gradient - gradient.mean()) / curvature
            return np.full(classes, np.sign(total)) if abs(total) > ROUNDING else apart

        def blocks() -> Iterator[FloatArray]:
            for ids in np.split(active, range(ROWS_AT_ONCE, len(active), ROWS_AT_ONCE)):
                yield self._counts[ids] * (self._inverse[ids] * np.sqrt(scale[ids]))[:, None]

        mean = np.full((classes, classes), 1 / classes)
        centring = np.eye(classes) - mean
        scaling = centring / np.sqrt(max(1.0, curvature)) + mean
        ridge, goal = np.sqrt(min(1.0, curvature)) * centring, scaling @ gradient
        gram = sum((rows.T @ rows for rows in blocks()), np.zeros_like(mean))
        values, vectors = np.linalg.eigh(scaling @ gram @ scaling + ridge @ ridge)
        if values[0] <= 1e-11 * values[-1]:
            for rows in blocks():
                ridge = np.linalg.qr(np.vstack([ridge, rows @ scaling]), mode="r")
            _, roots, transposed = np.linalg.svd(ridge)
            values, vectors = np.where(roots > 1e-15 * roots[0], roots**2, np.inf), transposed.T
        step: FloatArray = scaling @ vectors @ ((vectors.T @ goal) / values)
        return step

    def _nearest_by_columns(self) -> Projection:
        """Project by nonnegative least squares among a few clients; those that lessen the distance are added."""
        # On the ray of a mix, the least of |D t q|^2 + (1 - t)^2, D_i = S_i - T, grows with |D q|: so that least over
        # t q >= 0 lies on the ray of the solution.
        from scipy.optimize import nnls

        chosen, best, least = np.unique([np.argmax(column * self._inverse) for column in self._counts.T]), None, np.inf
        while True:
            differences = self._counts[chosen].T * self._inverse[chosen] - self.target[:, None]
            scale = float(np.abs(differences).max()) or 1.0
            ray, _ = nnls(np.vstack([differences / scale, np.ones(len(chosen))]), np.eye(len(differences) + 1)[-1])
            weights = np.zeros(len(self._shares))
            weights[chosen] = ray / ray.sum()
            found = self._projection(weights)
            distance = float(found.residual @ found.residual)
            if best is not None and found.kkt >= best.kkt and distance >= least:
                return best
            if found.kkt <= ROUNDING / 10:
                return found
            best, least = found, distance
            slack = self._slack(weights, found.residual)
            better = np.argsort(-slack, kind="stable")[: 2 * len(self.target)]
            chosen = np.union1d(np.flatnonzero(weights), better[slack[better] > 0])

    def _nearest_within_limit(self) -> Projection:
        """Project by proximal steps with falling curvature, for equal shares."""
        shares = np.full(len(self._shares), 1 / len(self._shares))
        activity, best, curvature = np.ones_like(shares), None, 1e-4
        while True:
            y = self._ascend(shares, curvature, activity, self.target, np.zeros_like(self.target))[1]
            activity = np.clip(y, 0.0, self._limit / shares)
            found = self._projection(self._whole(shares * activity))
            if found.kkt <= ROUNDING:
                return found
            if best is not None and curvature == 1e-8 and found.kkt > best.kkt / 10:
                return min(best, found, key=lambda projection: projection.kkt)
            best, curvature = found, max(curvature / 100, 1e-8)

    def _projection(self, weights: FloatArray) -> Projection:
        residual = self.target - self._mean(weights)
        return Projection(weights, residual, *self._certificate(weights, -2 * self._scores(residual)))

    def _slack(self, weights: FloatArray, residual: FloatArray) -> FloatArray:
        """Each client's score on the residual minus the best score of a client below the limit."""
        # It is 0 on the face of the hull that contains the projection; below 0 a client has no weight, and above, which
        # needs a limit, that of the limit.
        scores = self._scores(residual)
        below = weights < self._limit * (1 - 1e-12)
        with_weight = scores[below & (weights > 0)]
        best = with_weight.max() if len(with_weight) else scores[below].max() if below.any() else scores.min()
        slack: FloatArray = scores - best
        return slack

    def _certificate(
        self, weights: FloatArray, gradient: FloatArray, multiplier: float | None = None
    ) -> tuple[float, float]:
        """Bound the excess of weights with such partial derivatives; say how far they are from stationary, too."""
        # A derivative is the multiplier inside, at least that at 0, at most that at the limit. The bound is the most
        # that the linearised objective can fall.
        full = weights >= self._limit * (1 - 1e-12)
        free = np.where(full, 0.0, weights)
        if multiplier is None:
            multiplier = float(free @ gradient / free.sum()) if free.any() else float(gradient[full].max())
        excess = gradient - multiplier
        at_bounds = np.where(full, np.maximum(excess, 0), np.maximum(-excess, 0))
        kkt = float(np.where(free > 0, np.abs(excess), at_bounds).max())
        most = 1.0 if self._limit == np.inf else self._limit
        lowest = np.sort(excess) @ np.clip(1 - most * np.arange(len(excess)), 0.0, most)
        return max(float(weights @ excess - lowest), 0.0), kkt

    def _whole(self, weights: FloatArray) -> FloatArray:
        """Weights of sum 1, none above the limit; those that are near a bound up to rounding are put on it."""
        full = weights >= self._limit * (1 - 1e-7)
        if not full.any():
            whole: FloatArray = weights / weights.sum()
            return whole
        free = np.where(full | (weights <= self._limit * ROUNDING), 0.0, weights)
        rest = 1 - self._limit * np.count_nonzero(full)
        if rest > 0 and free.any():
            return np.where(full, self._limit, free * (rest / free.sum()))
        equal: FloatArray = full / full.sum()
        return equal


def _step_length(slope: Callable[[float], float]) -> float:
    """Find about where a falling slope is 0; 1 is tried first."""
    from scipy.optimize import brentq  # it takes long to import

    first, high = slope(0.0), 1.0
    if first <= 0 or abs(slope(1.0)) <= 0.1 * first:
        return 1.0
    while slope(high) > 0:
        if high > 1e18:
            return high
        high *= 4
    return float(brentq(slope, 0.0, high, xtol=1e-300, rtol=1e-2))


def limited(weights: ArrayLike, limit: float, sizes: ArrayLike) -> FloatArray:
    """Weights, `(clients,)`, sum 1, of which none is above a limit from 0 (excluded) to 1.

    What is cut off goes to the other clients in proportion to their weights, again and again until none is above the
    limit. Where nobody else has weight, it goes in equal parts to those who hold a sample and have none. Where the
    limit can't hold, as there are fewer than 1 / limit clients with a sample, these have equal weights.

    Example:
        limited([0.8, 0.15, 0.05], 0.5, [80, 15, 5])    # [0.5, 0.375, 0.125]
    """
    if not 0 < limit <= 1:
        raise ArgumentError(f"limit: must be above 0 and at most 1, not {limit!r}")
    shares = np.asarray(weights, dtype=np.float64)
    above, held = shares > limit * (1 + 1e-12), np.asarray(sizes) > 0
    if not above.any():
        return shares
    if held.sum() * limit <= 1:
        equal: FloatArray = held / held.sum()
        return equal
    full = np.zeros_like(held)
    while above.any():
        full |= above
        free = held & ~full
        wanted = np.where(free, shares, 0.0)
        if not wanted.any():
            wanted = free.astype(np.float64)
        rest = 1 - limit * full.sum()
        found = np.where(full, limit, wanted * (rest / wanted.sum()))
        above = free & (found > limit * (1 + 1e-12))
    return found
