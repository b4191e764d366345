"""FedPALS's programme: min over a >= 0, sum a = 1 of ||T - sum_i a_i S_i||^2 + lambda sum_i a_i^2 / n_i.

With p_i = n_i / N, x_i = a_i / p_i and kappa = lambda / N the penalty is kappa sum p_i x_i^2, and x = 1 is
FedAvg. `labels.ascent` solves this through its dual. Below kappa = 1e-6 the scores of the clients that matter
differ from those of the others by less than rounding allows to divide by kappa; there the projection r on the hull is
found first, and the programme is solved in the scale of kappa around it: x_i = max(0, slack_i / kappa + S_i.v). At
strength 0 only clients with slack 0, the face that carries the projection, can have weight. The constraint sum_i a_i
S_i = T - r is then met by the method of multipliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.labels import CountsLike, as_counts, as_sizes, as_target, effective_sample_size
from fedskew.labels.ascent import Mixes, ascend, normalised
from fedskew.labels.hull import FINEST, MET, Projection, certify_projection, multipliers, project
from fedskew.weighting._protocol import FloatArray

DIRECT = 1e-6
"""The least kappa that is solved without the projection."""

ON_FACE = 1e-12
"""How far below the best score a client may lie and still belong to the face that carries the projection."""

IN_HULL = 1e-10
"""Up to which residual in every class the target is taken to lie in the hull: chasing what is left wins nothing."""

NOTHING = 1e-28
"""A squared distance that is rounding."""

INDEPENDENT = 1e-9
"""From which ratio of singular values on mixes are taken to be linearly independent."""

REACHED = 1e-9
"""Relative accuracy of a strength that is found for a share of effective samples."""


@dataclass(frozen=True)
class Solution:
    """FedPALS's weights and how good they are.

    `weights`: `(clients,)`, sum 1. `gap`: by how much their objective exceeds the smallest at most; `kkt`: the largest
    violation of stationarity (a client with weight whose partial derivative differs from the multiplier, one without
    whose derivative is below it). Both are computed from the weights, in the programme with sizes in units of their
    mean and the strength in the same unit, divided by max(1, strength / samples), so that they stay comparable when the
    penalty dominates. At strength 0 they are the worse of two: those of the distance, and those of `sum a^2 / n` among
    the best fitting weights, relative to its value. `ess`: effective sample size, in samples. `distance`: `||T - sum
    a_i S_i||^2`.
    """

    weights: FloatArray
    gap: float
    kkt: float
    ess: float
    distance: float


class Programme:
    """The programme of one round, with kappa = strength / samples as its only parameter."""

    def __init__(self, counts: CountsLike, target: ArrayLike, sizes: ArrayLike | None) -> None:
        held = as_counts(counts)
        self.target = as_target(target, held.shape[1])
        self.mixes = Mixes(held, as_sizes(sizes, held))
        self._projection: Projection | None = None

    def solve(self, kappa: float) -> Solution:
        """The weights at this kappa, certified; one below FINEST is taken for 0, one above 1 / FINEST for infinity."""
        if kappa > 1 / FINEST:
            weights, gap, kkt = self.mixes.shares, 0.0, 0.0
        elif kappa >= DIRECT:
            start = np.zeros(self.mixes.classes)
            _, y = ascend(self.mixes, self.mixes.shares, kappa, np.ones(len(self.mixes.shares)), self.target, start)
            weights = normalised(self.mixes.shares * np.maximum(y, 0.0))
            gap, kkt = self._certify(weights, kappa)
        else:
            weights, gap, kkt = self._solve_around_projection(kappa if kappa >= FINEST else 0.0)
        residual = self.target - self.mixes.blend(weights)
        ess = effective_sample_size(weights, self.mixes.shares * self.mixes.samples)
        return Solution(weights, gap, kkt, ess, float(residual @ residual))

    def kappa(self, share: float) -> float:
        """The smallest kappa whose effective sample size is this share of all samples."""
        missing = self.target - self.mixes.blend(self.mixes.shares)
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
        return self.solve(kappa).ess / self.mixes.samples

    def _solve_around_projection(self, kappa: float) -> tuple[FloatArray, float, float]:
        if self._projection is None:
            self._projection = project(self.mixes, self.target)
        projection = self._projection
        residual, slack, inside = projection.residual, projection.slack, projection.meeting
        if inside is not None and kappa == 0:
            return inside.weights, *self._certify_limit(inside.weights, inside.v, self.mixes.present)
        face, met = self.mixes.present & (slack >= -max(ON_FACE, 10 * projection.kkt)), MET
        if np.abs(residual).max() <= IN_HULL:
            met = max(MET, 2 * float(np.abs(residual).max()))
            residual, face = np.zeros_like(residual), self.mixes.present
        if kappa == 0:
            only = self._only_choice(projection.weights, face)
            if only is not None:
                return projection.weights, *self._certify_limit(projection.weights, only, face)
        offset = np.where(face, 0.0, slack / kappa if kappa else -np.inf)
        found = multipliers(self.mixes, offset, self.target - residual, kappa, met, begin=inside)
        if kappa:
            return found.weights, *self._certify(found.weights, kappa)
        return found.weights, *self._certify_limit(found.weights, found.v, face)

    def _only_choice(self, weights: FloatArray, face: NDArray[np.bool_]) -> FloatArray | None:
        """The v of these weights where the face's mixes are linearly independent and so leave no choice; else None."""
        members = np.flatnonzero(face)
        if len(members) > self.mixes.classes:
            return None
        x = weights[members] / self.mixes.shares[members]
        v, _, rank, _ = np.linalg.lstsq(self.mixes.rows(members), x, rcond=INDEPENDENT)
        return np.asarray(v, dtype=np.float64) if rank == len(members) else None

    def _certify(self, weights: FloatArray, kappa: float) -> tuple[float, float]:
        """Gap and KKT residual at kappa > 0.

        The dual point is the residual itself, with the multiplier m that the weights give; then primal - dual is a sum
        of terms >= 0 without cancellation. Where the penalty is below rounding, the distance's own gap plus the
        penalty's excess over its least value bounds it better; both bounds hold.
        """
        shares = self.mixes.shares[self.mixes.present]
        x = weights[self.mixes.present] / shares
        scores = self.mixes.scores(self.target - self.mixes.blend(weights))[self.mixes.present]
        multiplier = float((shares * x) @ (kappa * x - scores))
        outer = scores + multiplier
        excess = kappa * x - outer
        gap = float(shares @ ((kappa * x - np.maximum(outer, 0)) ** 2 / kappa + 2 * x * np.maximum(-outer, 0)))
        gap += 2 * abs(multiplier * (float(shares @ x) - 1))
        without = 2 * float(scores.max() - (shares * x) @ scores) + kappa * float(shares @ (x - 1) ** 2)
        kkt = 2 * float(np.where(x > 0, np.abs(excess), np.maximum(-excess, 0)).max())
        scale = max(1.0, kappa)
        return min(gap, without) / scale, kkt / scale

    def _certify_limit(self, weights: FloatArray, v: FloatArray, face: NDArray[np.bool_]) -> tuple[float, float]:
        """Gap and KKT residual at strength 0: of the distance, and of the spread among what fits best."""
        fit = certify_projection(self.mixes, self.target, weights)
        shares = self.mixes.shares[face]
        x = weights[face] / shares
        y = self.mixes.scores(v)[face]
        spread = float(shares @ x**2)
        gap = float(shares @ ((x - np.maximum(y, 0)) ** 2 + 2 * x * np.maximum(-y, 0))) / spread
        kkt = float(np.where(x > 0, np.abs(x - y), np.maximum(y, 0)).max() / x.max())
        return max(fit.gap, gap), max(fit.kkt, kkt)
