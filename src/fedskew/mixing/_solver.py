"""The solver of FedPALS's programme: the programme itself, the projection on the hull of marginals, certificates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedskew.mixing._dual import ROUNDING, FloatArray, Mixes, ascend, centred, cut, normalised

DIRECT = 1e-6
"""The smallest kappa for which the programme is solved without the projection."""

ON_FACE = 1e-12
"""A client whose score is at most this far below the best belongs to the face of the hull with the projection."""

IN_HULL = 1e-10
"""The target counts as inside the hull if the residual is at most this in every class."""

NOTHING = 1e-28
"""Squared distances up to this size are rounding errors."""

INDEPENDENT = 1e-9
"""Mixes count as linearly independent above this ratio of their singular values."""

REACHED = 1e-9
"""Relative accuracy of the kappa that `Programme.kappa` finds."""

AT_LIMIT = 1e-7
"""A weight that is nearer to the limit than this, relatively, is put on it."""

COARSEST = 1e-6
"""Initial curvature of the method of multipliers."""

FINEST = 1e-20
"""The smallest curvature of the method of multipliers, and the smallest kappa; a smaller kappa counts as 0."""

MET = 1e-12
"""A constraint on a share of the mix counts as met up to this difference."""


@dataclass(frozen=True)
class Solution:
    """FedPALS's weights with certificates of their optimality.

    `gap` and `kkt` are computed from the weights, for the programme with sizes and strength in units of the mean size.
    They are divided by max(1, strength / samples), which keeps them comparable if the penalty dominates. At strength 0
    each is the larger of two values: one for the distance to the target, and one for the spread `sum a^2 / n` among the
    weights of smallest distance, relative to the spread.

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
class Meeting:
    """Weights that give a required label mix, from the method of multipliers.

    Attributes:
        weights: Client weights, `(clients,)`, sum 1.
        v: The dual's unknowns, `(classes,)`.
        curvature: The last curvature used.
        missing: Largest difference between the required mix and the mix of the weights, over the classes.
    """

    weights: FloatArray
    v: FloatArray
    curvature: float
    missing: float


@dataclass(frozen=True)
class Projection:
    """The mix nearest to the target that weighted clients can have.

    Attributes:
        weights: Weights that give this mix, shape `(clients,)`; there may be others.
        residual: Target minus nearest mix, shape `(classes,)`.
        slack: Each client's score on the residual minus the best score of a client below the limit, shape
            `(clients,)`. Clients with slack 0 are the face of the hull that contains the projection; below 0, a client
            has no weight; above, which needs a limit, its weight is the limit.
        gap: Upper bound on how much the squared distance exceeds the minimum.
        kkt: Largest violation of stationarity.
        meeting: Weights with the largest effective sample size, if the target lies in the hull; else None.
    """

    weights: FloatArray
    residual: FloatArray
    slack: FloatArray
    gap: float
    kkt: float
    meeting: Meeting | None = None


class Programme:
    """FedPALS's programme for one round, with kappa = strength / samples as its only parameter.

    Args:
        counts: Label counts, shape `(clients, classes)`; not checked here.
        target: Target mix, shape `(classes,)`, sum 1.
        sizes: Number of samples of each client, shape `(clients,)`; None: the row sums of `counts`.
        limit: Upper limit on each weight; None: there is none. Where the clients are too few for it, their weights are
            equal.

    Raises:
        ArgumentError: No client holds a sample.
    """

    def __init__(
        self, counts: FloatArray, target: FloatArray, sizes: FloatArray | None = None, limit: float | None = None
    ) -> None:
        self.target = target
        self._mixes = Mixes(counts, sizes)
        if limit is not None and limit < 1:
            self._mixes.limit = max(limit, 1 / np.count_nonzero(self._mixes.present))

    @property
    def samples(self) -> float:
        """Number of samples of all clients that can have weight."""
        return self._mixes.samples

    @cached_property
    def _level(self) -> FloatArray:
        """The weights of largest effective sample size: FedAvg's, as far as the limit allows."""
        mixes = self._mixes
        weights, full = mixes.shares, np.zeros_like(mixes.present)
        while (above := weights > mixes.limit * (1 + 1e-15)).any():
            full |= above
            free = np.where(full, 0.0, mixes.shares)
            rest = 1 - mixes.limit * np.count_nonzero(full)
            weights = np.where(full, mixes.limit, free * (rest / free.sum() if free.any() else 0.0))
        return weights

    @cached_property
    def projection(self) -> Projection:
        """The projection of the target on the hull of the clients' marginals; computed once for all kappa."""
        return _project(self._mixes, self.target)

    def solve(self, kappa: float) -> Solution:
        """Compute the optimal weights at a kappa.

        Args:
            kappa: Strength / samples; below 1e-20 it counts as 0, above 1e20 as infinity.

        Returns:
            The weights, with certificates of their optimality.
        """
        mixes = self._mixes
        if kappa > 1 / FINEST:
            weights, gap, kkt = self._level, 0.0, 0.0
        elif kappa >= DIRECT:
            _, y = ascend(mixes, mixes.shares, kappa, np.ones(len(mixes.shares)), self.target, np.zeros(mixes.classes))
            weights = _whole(mixes, mixes.shares * cut(y, mixes.upper(mixes.shares)))
            gap, kkt = _certify(mixes, self.target, weights, kappa)
        else:
            weights, gap, kkt = self._solve_around_projection(kappa if kappa >= FINEST else 0.0)
        residual = self.target - mixes.mean(weights)
        sizes = (mixes.shares * mixes.samples)[mixes.present]
        ess = 1 / float(np.sum(weights[mixes.present] ** 2 / sizes))
        return Solution(weights, gap, kkt, ess, float(residual @ residual))

    def kappa(self, share: float) -> float:
        """Find the smallest kappa at which the effective sample size is at least a share of all samples.

        Args:
            share: The share, from 0 to 1.

        Returns:
            kappa; infinity if only FedAvg's weights reach the share, or if a limit keeps all weights from it.
        """
        missing = self.target - self._mixes.mean(self._level)
        distance = float(missing @ missing)
        if share == 0 or distance <= NOTHING:
            return 0.0
        most = 1.0 if self._mixes.limit == np.inf else self._share(math.inf)
        if share >= most:
            return 0.0 if self._share(0.0) >= most * (1 - REACHED) else math.inf
        # These weights are feasible, so kappa (1 / share(kappa) - 1 / most) <= distance: here the share is reached.
        high = distance / (1 / share - 1 / most)
        low = high
        while low >= DIRECT and self._share(low) >= share:
            high, low = low, low / 30
        if low < DIRECT and self._share(0.0) >= share * (1 - REACHED):
            return 0.0
        while low > FINEST and self._share(low) >= share:
            high, low = low, low / 30
        return self._root(share, low, high) if low > FINEST else high

    def _root(self, share: float, low: float, high: float) -> float:
        """Narrow a bracket to a relative width of REACHED by the Illinois rule on logarithms; return its upper end."""
        below, above = (math.log(self._share(kappa) / share) for kappa in (low, high))
        side = 0
        while high > low * (1 + REACHED):
            part = below / (below - above) if above > below else 0.5
            middle = math.exp(math.log(low) + part * math.log(high / low))
            middle = min(max(middle, low * (1 + REACHED / 2)), high / (1 + REACHED / 2))
            value = math.log(self._share(middle) / share)
            if value >= 0:
                high, above = middle, value
                below = below / 2 if side > 0 else below
                side = 1
            else:
                low, below = middle, value
                above = above / 2 if side < 0 else above
                side = -1
        return high

    def _share(self, kappa: float) -> float:
        return self.solve(kappa).ess / self.samples

    def _solve_around_projection(self, kappa: float) -> tuple[FloatArray, float, float]:
        """Compute weights, gap and kkt for a small kappa.

        The weights are given by the x_i = max(0, slack_i / kappa + S_i.v), or the limit where that is smaller, whose
        label mix is T - r. At kappa 0 clients off the face have no weight, or that of the limit.
        """
        mixes, target, projection = self._mixes, self.target, self.projection
        residual, slack, inside = projection.residual, projection.slack, projection.meeting
        if inside is not None and kappa == 0:
            return inside.weights, *_certify_limit(mixes, target, inside.weights, inside.v, mixes.present)
        face, met = mixes.present & (np.abs(slack) <= max(ON_FACE, 10 * projection.kkt)), MET
        if np.abs(residual).max() <= IN_HULL:
            met = max(MET, 2 * float(np.abs(residual).max()))
            residual, face = np.zeros_like(residual), mixes.present
        members = np.flatnonzero(face)
        if kappa == 0 and len(members) <= mixes.classes and mixes.limit == np.inf:
            x = projection.weights[members] / mixes.shares[members]
            found, _, rank, _ = np.linalg.lstsq(mixes.rows(members), x, rcond=INDEPENDENT)
            if rank == len(members):  # the face's mixes are linearly independent: its weights are unique
                v = np.asarray(found, dtype=np.float64)
                return projection.weights, *_certify_limit(mixes, target, projection.weights, v, face)
        offset = np.where(face, 0.0, slack / kappa if kappa else np.where(slack > 0, np.inf, -np.inf))
        end = _meet(mixes, offset, target - residual, kappa, met, begin=inside)
        if kappa:
            return end.weights, *_certify(mixes, target, end.weights, kappa)
        return end.weights, *_certify_limit(mixes, target, end.weights, end.v, face)


def _project(mixes: Mixes, target: FloatArray) -> Projection:
    """Project a target mix on the hull of the clients' marginals, exactly up to rounding.

    If the target lies in the hull, which is the usual case, the method of multipliers reaches it fastest. Otherwise,
    proximal steps with falling curvature find the clients that have weight; once they no longer improve the result, an
    active-set least squares among these clients gives the exact projection. Client sizes are not used in this case.
    """
    met = _meet(mixes, np.where(mixes.present, 0.0, -np.inf), target, gain=2.0)
    if met.missing <= MET:
        return replace(_certify_projection(mixes, target, met.weights), meeting=met)
    shares = mixes.present / mixes.present.sum()
    activity = mixes.present.astype(np.float64)
    best, curvature = None, 1e-4
    while True:
        start = np.zeros(mixes.classes)
        activity = cut(ascend(mixes, shares, curvature, activity, target, start)[1], mixes.upper(shares))
        found = _certify_projection(mixes, target, _whole(mixes, shares * activity))
        if found.kkt <= ROUNDING:
            return found
        if best is not None and curvature == 1e-8 and found.kkt > best.kkt / 10:
            nearest = min(best, found, key=lambda projection: projection.kkt)
            return _finish(mixes, target, nearest) if mixes.limit == np.inf else nearest
        best, curvature = found, max(curvature / 100, 1e-8)


def _meet(
    mixes: Mixes,
    offset: FloatArray,
    mix: FloatArray,
    kappa: float = 0.0,
    met: float = MET,
    gain: float = 0.0,
    begin: Meeting | None = None,
) -> Meeting:
    """Find x_i = max(0, offset_i + S_i.v) with sum_i a_i S_i = mix - kappa (v - mean(v)), by the method of multipliers.

    At kappa 0 and offset 0 these are the weights of largest effective sample size among the weights that give the mix.
    Each step solves a programme whose curvature `ascend` can resolve, and adds the missing part of the mix to the next
    step's target. The first curvature is COARSEST, or the last one of `begin`. The method ends when at most `met` of
    the mix is missing and a step gains little, when nothing more can be gained, or as soon as a step reduces the
    missing part by less than the factor `gain`.
    """
    v, curvature = (np.ones(mixes.classes), COARSEST) if begin is None else (begin.v, begin.curvature)
    curvature, multiplier = max(curvature, kappa), centred(v)
    y, least = offset + mixes.scores(v), np.inf
    while True:
        v, y = ascend(mixes, mixes.shares, curvature, y, mix + (curvature - kappa) * multiplier, v)
        multiplier = centred(v)
        weights = mixes.shares * cut(y, mixes.upper(mixes.shares))
        missing = float(np.abs(mix - kappa * multiplier - mixes.mean(weights)).max())
        met_and_spent = missing <= met and 10 * missing > least
        stuck = curvature == kappa or (curvature == FINEST and 2 * missing > least)
        ended = missing <= ROUNDING / 10 or met_and_spent or stuck
        if ended or missing * gain > least:
            return Meeting(_whole(mixes, weights), v, curvature, missing)
        least, curvature = min(least, missing), max(curvature / 10, kappa, FINEST)


def _finish(mixes: Mixes, target: FloatArray, found: Projection) -> Projection:
    """Make a projection exact by active-set least squares.

    Each iteration adds the client that reduces the distance most to the clients with weight, and moves to the least
    squares solution of these.
    """
    weights, best, since = found.weights.copy(), found, 0
    while best.kkt > ROUNDING / 10 and since <= 5 + np.count_nonzero(weights):
        entering = int(np.argmax(found.slack))
        chosen = np.flatnonzero(weights > 0)
        if weights[entering] == 0:
            chosen = np.append(chosen, entering)
        _least_squares(mixes, target, weights, chosen)
        weights /= weights.sum()
        found = _certify_projection(mixes, target, weights.copy())
        since += 1
        if found.kkt < best.kkt:
            best, since = found, 0
    return best


def _least_squares(mixes: Mixes, target: FloatArray, weights: FloatArray, chosen: NDArray[np.int64]) -> None:
    """Move the chosen clients' weights, in place and with the same sum, to the mix nearest to the target.

    A client whose weight reaches 0 is removed from the chosen ones.
    """
    while len(chosen) > 1:
        place = int(np.argmax(weights[chosen]))
        rest = np.delete(chosen, place)
        differences = mixes.rows(rest) - mixes.rows(chosen[[place]])
        missing = target - mixes.mean(weights)
        change = np.linalg.lstsq(differences.T, missing, rcond=ROUNDING)[0]
        chosen = np.append(rest, chosen[place])
        change = np.append(change, -change.sum())
        falling = np.flatnonzero(change < 0)
        limits = weights[chosen[falling]] / -change[falling]
        if not len(limits) or limits.min() >= 1:
            weights[chosen] = np.maximum(weights[chosen] + change, 0.0)
            return
        weights[chosen] = np.maximum(weights[chosen] + limits.min() * change, 0.0)
        weights[chosen[falling[np.argmin(limits)]]] = 0.0
        chosen = chosen[weights[chosen] > 0]


def _certify(mixes: Mixes, target: FloatArray, weights: FloatArray, kappa: float) -> tuple[float, float]:
    """Compute the gap and the KKT residual of weights at kappa > 0.

    The dual point is the residual, with the multiplier that the weights give; primal - dual is then a sum of terms >= 0
    without cancellation. If the penalty is below rounding, the gap of the distance plus the penalty's excess over its
    minimum is the better bound. Both bounds hold, and the smaller one is returned.
    """
    shares, full = mixes.shares[mixes.present], _full(mixes, weights)[mixes.present]
    x = weights[mixes.present] / shares
    scores = mixes.scores(target - mixes.mean(weights))[mixes.present]
    free = shares * np.where(full, 0.0, x)
    known = kappa * x - scores
    multiplier = float(free @ known / free.sum()) if free.any() else float(known[full].max())
    outer = scores + multiplier
    z = cut(outer / kappa, _upper(mixes, mixes.present))
    gap = 2 * float(shares @ ((z - x) * (outer - kappa * (z + x) / 2)))
    gap += 2 * abs(multiplier * (float(shares @ x) - 1))
    without = 2 * (_highest(mixes, scores) - float((shares * x) @ scores)) + kappa * float(shares @ (x - 1) ** 2)
    kkt = 2 * _violated(kappa * x - outer, x, full)
    scale = max(1.0, kappa)
    return min(gap, without) / scale, kkt / scale


def _certify_limit(
    mixes: Mixes, target: FloatArray, weights: FloatArray, v: FloatArray, face: NDArray[np.bool_]
) -> tuple[float, float]:
    """Compute the gap and the KKT residual at strength 0, of the distance and of the spread (see `Solution`)."""
    fit = _certify_projection(mixes, target, weights)
    shares, full = mixes.shares[face], _full(mixes, weights)[face]
    x = weights[face] / shares
    y = mixes.scores(v)[face]
    if not x.any():  # every weight is that of the limit, or none
        return fit.gap, fit.kkt
    spread = float(shares @ x**2)
    z = cut(y, _upper(mixes, face))
    gap = float(shares @ ((z - x) * (2 * y - (z + x)))) / spread
    kkt = _violated(x - y, x, full) / float(x.max())
    return max(fit.gap, gap), max(fit.kkt, kkt)


def _certify_projection(mixes: Mixes, target: FloatArray, weights: FloatArray) -> Projection:
    """Make the projection that weights give, with gap and KKT residual of the distance."""
    residual = target - mixes.mean(weights)
    scores = np.where(mixes.present, mixes.scores(residual), -np.inf)
    chosen, full = weights > 0, _full(mixes, weights)
    best = np.max(scores[~full], initial=-np.inf)
    if best == -np.inf:
        best = scores[full].min()
    gap = 2 * (_highest(mixes, scores[mixes.present]) - weights[chosen] @ scores[chosen])
    kkt = 2 * (best - scores[chosen].min())
    return Projection(weights, residual, scores - best, max(float(gap), 0.0), max(float(kkt), 0.0))


def _whole(mixes: Mixes, weights: FloatArray) -> FloatArray:
    """Weights of sum 1 of which none is above the limit; those that are near a bound up to rounding are put on it."""
    if mixes.limit == np.inf:
        return normalised(weights)
    full = weights >= mixes.limit * (1 - AT_LIMIT)
    free = np.where(full | (weights <= mixes.limit * ROUNDING), 0.0, weights)
    rest = 1 - mixes.limit * np.count_nonzero(full)
    if rest > 0 and free.any():
        return np.where(full, mixes.limit, free * (rest / free.sum()))
    return normalised(full.astype(np.float64))


def _upper(mixes: Mixes, some: NDArray[np.bool_]) -> FloatArray | None:
    """Return the upper bounds of some clients' x for FedAvg's shares; None if there is no limit."""
    upper = mixes.upper(mixes.shares)
    return None if upper is None else upper[some]


def _full(mixes: Mixes, weights: FloatArray) -> NDArray[np.bool_]:
    """Mask of the clients whose weight is that of the limit."""
    return weights >= mixes.limit * (1 - 1e-12)


def _highest(mixes: Mixes, scores: FloatArray) -> float:
    """Return the highest score that weights within the limit can have."""
    if mixes.limit == np.inf:
        return float(scores.max())
    return float(np.sort(scores)[::-1] @ np.clip(1 - mixes.limit * np.arange(len(scores)), 0.0, mixes.limit))


def _violated(excess: FloatArray, x: FloatArray, full: NDArray[np.bool_]) -> float:
    """Return how far x is from stationary: an excess is 0 inside, >= 0 at 0, <= 0 at the limit."""
    at_bounds = np.where(full, np.maximum(excess, 0), np.maximum(-excess, 0))
    return float(np.where((x > 0) & ~full, np.abs(excess), at_bounds).max())
