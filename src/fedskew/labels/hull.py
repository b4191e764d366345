"""The mixes that weighted clients can have: the hull of their label marginals, and how near a target lies to it.

FedPALS (section 3.1) weighs clients by the programme

    min over a >= 0, sum a = 1   ||T - sum_i a_i S_i||^2 + lambda sum_i a_i^2 / n_i

with S_i the label marginals of client i, n_i its size, and T the target mix. `project` is the programme without its
penalty; `multipliers` finds, of the weights that give a mix, those with the largest effective sample size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedskew.labels._counts import FloatArray
from fedskew.labels.ascent import ROUNDING, Mixes, ascend, centred, normalised

COARSEST = 1e-6
"""The curvature with which the method of multipliers begins."""

FINEST = 1e-20
"""The least curvature that the method of multipliers goes down to."""

MET = 1e-12
"""Up to which part of the mix a constraint is met."""


@dataclass(frozen=True)
class Meeting:
    """Weights that meet a mix: the end of `multipliers`.

    `weights`: `(clients,)`; `v`: the dual's unknowns, `(classes,)`; `curvature`: the last; `missing`: the largest part
    of the mix that the weights miss.
    """

    weights: FloatArray
    v: FloatArray
    curvature: float
    missing: float


@dataclass(frozen=True)
class Projection:
    """The nearest mix that weighted clients can have.

    `weights`: `(clients,)`, one of possibly many that reach it; `residual`: target minus nearest mix, `(classes,)`;
    `slack`: how far each client's score on the residual is below the best, `(clients,)`, <= 0: only clients with slack
    0 can have weight. `gap` bounds how much the squared distance exceeds the smallest; `kkt`: the largest violation of
    stationarity. `meeting`: where the target lies in the hull, the weights with the largest effective sample size.
    """

    weights: FloatArray
    residual: FloatArray
    slack: FloatArray
    gap: float
    kkt: float
    meeting: Meeting | None = None


def project(mixes: Mixes, target: FloatArray) -> Projection:
    """The projection of a target mix on the hull of the clients' marginals, to rounding.

    Where the target lies in the hull, as it mostly does, the method of multipliers meets it soonest. Elsewhere proximal
    steps with a falling curvature find which clients matter, as long as they gain, and an active-set least squares
    among those ends exactly; sizes play no part then.
    """
    met = multipliers(mixes, np.where(mixes.present, 0.0, -np.inf), target, gain=2.0)
    if met.missing <= MET:
        return replace(certify_projection(mixes, target, met.weights), meeting=met)
    shares = mixes.present / mixes.present.sum()
    activity = mixes.present.astype(np.float64)
    best, curvature = None, 1e-4
    while True:
        start = np.zeros(mixes.classes)
        activity = np.maximum(ascend(mixes, shares, curvature, activity, target, start)[1], 0.0)
        found = certify_projection(mixes, target, normalised(shares * activity))
        if found.kkt <= ROUNDING:
            return found
        if best is not None and curvature == 1e-8 and found.kkt > best.kkt / 10:
            return _finish(mixes, target, min(best, found, key=lambda projection: projection.kkt))
        best, curvature = found, max(curvature / 100, 1e-8)


def multipliers(
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
    `begin` ended. Ends when no more than `met` is missing and a step wins little, when no more can be won, or as soon
    as a step wins less than the factor `gain`.
    """
    v, curvature = (np.ones(mixes.classes), COARSEST) if begin is None else (begin.v, begin.curvature)
    curvature, multiplier = max(curvature, kappa), centred(v)
    y, least = offset + mixes.scores(v), np.inf
    while True:
        v, y = ascend(mixes, mixes.shares, curvature, y, mix + (curvature - kappa) * multiplier, v)
        multiplier = centred(v)
        weights = mixes.shares * np.maximum(y, 0.0)
        missing = float(np.abs(mix - kappa * multiplier - mixes.blend(weights)).max())
        met_and_spent = missing <= met and 10 * missing > least
        stuck = curvature == kappa or (curvature == FINEST and 2 * missing > least)
        ended = missing <= ROUNDING / 10 or met_and_spent or stuck
        if ended or missing * gain > least:
            return Meeting(normalised(weights), v, curvature, missing)
        least, curvature = min(least, missing), max(curvature / 10, kappa, FINEST)


def certify_projection(mixes: Mixes, target: FloatArray, weights: FloatArray) -> Projection:
    """How near to optimal these weights are for the distance alone, from the weights themselves."""
    residual = target - mixes.blend(weights)
    scores = np.where(mixes.present, mixes.scores(residual), -np.inf)
    best = scores.max()
    chosen = weights > 0
    gap = 2 * (best - weights[chosen] @ scores[chosen])
    kkt = 2 * (best - scores[chosen].min())
    return Projection(weights, residual, scores - best, max(float(gap), 0.0), float(kkt))


def _finish(mixes: Mixes, target: FloatArray, found: Projection) -> Projection:
    """Move to the least squares solution of those with weight; let in who lessens the distance most; repeat."""
    weights, best, since = found.weights.copy(), found, 0
    while best.kkt > ROUNDING / 10 and since <= 5 + np.count_nonzero(weights):
        entering = int(np.argmax(found.slack))
        chosen = np.flatnonzero(weights > 0)
        if weights[entering] == 0:
            chosen = np.append(chosen, entering)
        _least_squares(mixes, target, weights, chosen)
        weights /= weights.sum()
        found = certify_projection(mixes, target, weights.copy())
        since += 1
        if found.kkt < best.kkt:
            best, since = found, 0
    return best


def _least_squares(mixes: Mixes, target: FloatArray, weights: FloatArray, chosen: np.ndarray) -> None:
    """Move the chosen clients' weights to the nearest mix, keeping their sum; who reaches 0 on the way leaves."""
    while len(chosen) > 1:
        place = int(np.argmax(weights[chosen]))
        rest = np.delete(chosen, place)
        differences = mixes.rows(rest) - mixes.rows(chosen[[place]])
        missing = target - mixes.blend(weights)
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
