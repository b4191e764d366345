"""One solve of FedPALS's programme, from top to bottom: the programme, the projection on the hull, certificates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedskew.mixing._dual import ROUNDING, FloatArray, Mixes, ascend, centred, normalised

DIRECT = 1e-6
"""The smallest kappa that is solved without the projection."""

ON_FACE = 1e-12
"""How far below the best score a client may lie and still belong to the face that carries the projection."""

IN_HULL = 1e-10
"""Up to this residual in every class the target counts as inside the hull: reducing the rest gains nothing."""

NOTHING = 1e-28
"""Up to here a squared distance is rounding."""

INDEPENDENT = 1e-9
"""Above this ratio of singular values mixes count as linearly independent."""

REACHED = 1e-9
"""Relative accuracy of a kappa that is found for a share of effective samples."""

COARSEST = 1e-6
"""The curvature with which the method of multipliers begins."""

FINEST = 1e-20
"""The smallest curvature of the method of multipliers, and the smallest kappa; below, kappa counts as 0."""

MET = 1e-12
"""Up to here a constraint on a share of the mix counts as met."""


@dataclass(frozen=True)
class Solution:
    """FedPALS's weights with certificates of their optimality.

    `gap` and `kkt` are computed from the weights, for the programme with sizes in units of their mean and the strength
    in the same unit, divided by max(1, strength / samples), so that they stay comparable where the penalty dominates.
    At strength 0 each is the larger of two: that of the distance, and that of `sum a^2 / n` among the weights of the
    smallest distance, relative to its value.

    Attributes:
        weights: Client weights, shape `(clients,)`, sum 1.
        gap: Upper bound on how much their objective exceeds the minimum.
        kkt: Largest violation of stationarity: a client with weight whose partial derivative differs from the
            multiplier, or one without weight whose derivative is below it.
        ess: Effective sample size, in samples.
        distance: Squared distance to the target, `||T - sum a_i S_i||^2`.
    """

    weights: FloatArray
    gap: float
    kkt: float
    ess: float
    distance: float


@dataclass(frozen=True)
class Meeting:
    """Weights that meet a mix, from the method of multipliers.

    `weights`: `(clients,)`; `v`: the dual's unknowns, `(classes,)`; `curvature`: the last one used; `missing`: the
    largest share of the mix that the weights miss.
    """

    weights: FloatArray
    v: FloatArray
    curvature: float
    missing: float


@dataclass(frozen=True)
class Projection:
    """The nearest mix to the target that weighted clients can have.

    Attributes:
        weights: One of possibly many weights that reach it, shape `(clients,)`.
        residual: Target minus nearest mix, shape `(classes,)`.
        slack: How far each client's score on the residual lies below the best, shape `(clients,)`, <= 0. Only clients
            with slack 0, the face of the hull that carries the projection, can have weight.
        gap: Upper bound on how much the squared distance exceeds the minimum.
        kkt: Largest violation of stationarity.
        meeting: Where the target lies in the hull, the weights with the largest effective sample size.
    """

    weights: FloatArray
    residual: FloatArray
    slack: FloatArray
    gap: float
    kkt: float
    meeting: Meeting | None = None


class Programme:
    """The programme of one round, with kappa = strength / samples as its only parameter.

    Args:
        counts: Label counts, shape `(clients, classes)`, checked.
        target: Target mix, shape `(classes,)`, sum 1.
        sizes: Samples of each client, shape `(clients,)`; the row sums of `counts` where None.

    Raises:
        ArgumentError: No client holds a sample.
    """

    def __init__(self, counts: FloatArray, target: FloatArray, sizes: FloatArray | None = None) -> None:
        self.target = target
        self._mixes = Mixes(counts, sizes)

    @property
    def samples(self) -> float:
        """Samples of all clients that can have weight."""
        return self._mixes.samples

    @cached_property
    def projection(self) -> Projection:
        """The projection of the target on the hull of the clients' marginals; computed once, whatever kappa is."""
        return _project(self._mixes, self.target)

    def solve(self, kappa: float) -> Solution:
        """The weights at this kappa, with certificates; a kappa below 1e-20 counts as 0, above 1e20 as infinity."""
        mixes = self._mixes
        if kappa > 1 / FINEST:
            weights, gap, kkt = mixes.shares, 0.0, 0.0
        elif kappa >= DIRECT:
            _, y = ascend(mixes, mixes.shares, kappa, np.ones(len(mixes.shares)), self.target, np.zeros(mixes.classes))
            weights = normalised(mixes.shares * np.maximum(y, 0.0))
            gap, kkt = _certify(mixes, self.target, weights, kappa)
        else:
            weights, gap, kkt = self._solve_around_projection(kappa if kappa >= FINEST else 0.0)
        residual = self.target - mixes.mean(weights)
        sizes = (mixes.shares * mixes.samples)[mixes.present]
        ess = 1 / float(np.sum(weights[mixes.present] ** 2 / sizes))
        return Solution(weights, gap, kkt, ess, float(residual @ residual))

    def kappa(self, share: float) -> float:
        """The smallest kappa whose effective sample size is this share, from 0 to 1, of all samples."""
        missing = self.target - self._mixes.mean(self._mixes.shares)
        distance = float(missing @ missing)
        if share == 0 or distance <= NOTHING:
            return 0.0
        if share == 1:
            return 0.0 if self._share(0.0) >= 1 - REACHED else math.inf
        # FedAvg's weights are feasible, so kappa (1 / share(kappa) - 1) <= distance: here the share is reached.
        high = distance / (1 / share - 1)
        low = high
        while low >= DIRECT and self._share(low) >= share:
            high, low = low, low / 30
        if low < DIRECT and self._share(0.0) >= share * (1 - REACHED):
            return 0.0
        while low > FINEST and self._share(low) >= share:
            high, low = low, low / 30
        return self._root(share, low, high) if low > FINEST else high

    def _root(self, share: float, low: float, high: float) -> float:
        """The end `high` of a bracket narrowed to a relative width of REACHED, by the Illinois rule on logarithms."""
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
        """Weights, gap and kkt for a small kappa: x_i = max(0, slack_i / kappa + S_i.v) that meets T - r.

        At kappa 0 only clients on the face have weight.
        """
        mixes, target, projection = self._mixes, self.target, self.projection
        residual, slack, inside = projection.residual, projection.slack, projection.meeting
        if inside is not None and kappa == 0:
            return inside.weights, *_certify_limit(mixes, target, inside.weights, inside.v, mixes.present)
        face, met = mixes.present & (slack >= -max(ON_FACE, 10 * projection.kkt)), MET
        if np.abs(residual).max() <= IN_HULL:
            met = max(MET, 2 * float(np.abs(residual).max()))
            residual, face = np.zeros_like(residual), mixes.present
        members = np.flatnonzero(face)
        if kappa == 0 and len(members) <= mixes.classes:
            x = projection.weights[members] / mixes.shares[members]
            found, _, rank, _ = np.linalg.lstsq(mixes.rows(members), x, rcond=INDEPENDENT)
            if rank == len(members):  # the face's mixes are linearly independent: its weights are the only ones
                v = np.asarray(found, dtype=np.float64)
                return projection.weights, *_certify_limit(mixes, target, projection.weights, v, face)
        offset = np.where(face, 0.0, slack / kappa if kappa else -np.inf)
        end = _meet(mixes, offset, target - residual, kappa, met, begin=inside)
        if kappa:
            return end.weights, *_certify(mixes, target, end.weights, kappa)
        return end.weights, *_certify_limit(mixes, target, end.weights, end.v, face)


def _project(mixes: Mixes, target: FloatArray) -> Projection:
    """The projection of a target mix on the hull of the clients' marginals, up to rounding.

    Where the target lies in the hull, as it mostly does, the method of multipliers meets it soonest. Elsewhere proximal
    steps with a falling curvature find which clients matter, as long as they gain, and an active-set least squares
    among those ends exactly; sizes play no part then.
    """
    met = _meet(mixes, np.where(mixes.present, 0.0, -np.inf), target, gain=2.0)
    if met.missing <= MET:
        return replace(_certify_projection(mixes, target, met.weights), meeting=met)
    shares = mixes.present / mixes.present.sum()
    activity = mixes.present.astype(np.float64)
    best, curvature = None, 1e-4
    while True:
        start = np.zeros(mixes.classes)
        activity = np.maximum(ascend(mixes, shares, curvature, activity, target, start)[1], 0.0)
        found = _certify_projection(mixes, target, normalised(shares * activity))
        if found.kkt <= ROUNDING:
            return found
        if best is not None and curvature == 1e-8 and found.kkt > best.kkt / 10:
            return _finish(mixes, target, min(best, found, key=lambda projection: projection.kkt))
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
    """The method of multipliers: x_i = max(0, offset_i + S_i.v) with sum_i a_i S_i = mix - kappa (v - mean(v)).

    At kappa 0 and offset 0 these are the weights of largest effective sample size among those that give the mix. It
    solves programmes of a curvature that `ascend` can resolve, and adds back what they miss, from COARSEST or where
    `begin` ended. It ends when no more than `met` is missing and a step gains little, when no more can be gained, or as
    soon as a step gains less than the factor `gain`.
    """
    v, curvature = (np.ones(mixes.classes), COARSEST) if begin is None else (begin.v, begin.curvature)
    curvature, multiplier = max(curvature, kappa), centred(v)
    y, least = offset + mixes.scores(v), np.inf
    while True:
        v, y = ascend(mixes, mixes.shares, curvature, y, mix + (curvature - kappa) * multiplier, v)
        multiplier = centred(v)
        weights = mixes.shares * np.maximum(y, 0.0)
        missing = float(np.abs(mix - kappa * multiplier - mixes.mean(weights)).max())
        met_and_spent = missing <= met and 10 * missing > least
        stuck = curvature == kappa or (curvature == FINEST and 2 * missing > least)
        ended = missing <= ROUNDING / 10 or met_and_spent or stuck
        if ended or missing * gain > least:
            return Meeting(normalised(weights), v, curvature, missing)
        least, curvature = min(least, missing), max(curvature / 10, kappa, FINEST)


def _finish(mixes: Mixes, target: FloatArray, found: Projection) -> Projection:
    """End a projection exactly: move to the least squares solution of the clients with weight, and repeat.

    In each round the client that reduces the distance most joins them.
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
    """Move the chosen clients' weights to the nearest mix, keeping their sum; a client that reaches 0 leaves."""
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
    """Gap and KKT residual of weights at kappa > 0.

    The dual point is the residual itself, with the multiplier m that the weights give; then primal - dual is a sum of
    terms >= 0 without cancellation. Where the penalty is below rounding, the distance's own gap plus the penalty's
    excess over its least value is the better bound; both hold.
    """
    shares = mixes.shares[mixes.present]
    x = weights[mixes.present] / shares
    scores = mixes.scores(target - mixes.mean(weights))[mixes.present]
    multiplier = float((shares * x) @ (kappa * x - scores))
    outer = scores + multiplier
    excess = kappa * x - outer
    gap = float(shares @ ((kappa * x - np.maximum(outer, 0)) ** 2 / kappa + 2 * x * np.maximum(-outer, 0)))
    gap += 2 * abs(multiplier * (float(shares @ x) - 1))
    without = 2 * float(scores.max() - (shares * x) @ scores) + kappa * float(shares @ (x - 1) ** 2)
    kkt = 2 * float(np.where(x > 0, np.abs(excess), np.maximum(-excess, 0)).max())
    scale = max(1.0, kappa)
    return min(gap, without) / scale, kkt / scale


def _certify_limit(
    mixes: Mixes, target: FloatArray, weights: FloatArray, v: FloatArray, face: NDArray[np.bool_]
) -> tuple[float, float]:
    """Gap and KKT residual at strength 0: of the distance, and of the spread among the weights that fit best."""
    fit = _certify_projection(mixes, target, weights)
    shares = mixes.shares[face]
    x = weights[face] / shares
    y = mixes.scores(v)[face]
    spread = float(shares @ x**2)
    gap = float(shares @ ((x - np.maximum(y, 0)) ** 2 + 2 * x * np.maximum(-y, 0))) / spread
    kkt = float(np.where(x > 0, np.abs(x - y), np.maximum(y, 0)).max() / x.max())
    return max(fit.gap, gap), max(fit.kkt, kkt)


def _certify_projection(mixes: Mixes, target: FloatArray, weights: FloatArray) -> Projection:
    """The projection that these weights give, with its gap and KKT residual for the distance alone."""
    residual = target - mixes.mean(weights)
    scores = np.where(mixes.present, mixes.scores(residual), -np.inf)
    best = scores.max()
    chosen = weights > 0
    gap = 2 * (best - weights[chosen] @ scores[chosen])
    kkt = 2 * (best - scores[chosen].min())
    return Projection(weights, residual, scores - best, max(float(gap), 0.0), float(kkt))
