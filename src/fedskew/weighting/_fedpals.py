"""FedPALS (Listo Zec, Breitholtz, Johansson, "Overcoming label shift with target-aware federated learning").

    a = argmin  ||T - sum_i a_i S_i||^2 + lambda sum_i a_i^2 / n_i      (eq. 5)
        over a >= 0, sum a = 1

with S_i and n_i the label marginals and sizes of the participants, T the target mix and lambda the strength. A large
strength gives FedAvg. Strength 0 is the limit from above: of the weights that fit best, those with the largest
effective sample size (section 3.1, case 2); the problem as printed does not determine them. The authors' public
prototype differs: it does not square the distance, or penalises ||a||^2 / N (which tends to equal weights), and weighs
once with all clients.

Two bounds are ours, against clients that lie about their counts: the effective sample size trusts n_i, so that a lie
raises it. Under a limit L on a client's weight the programme has a_i <= L too, and is solved as exactly. At least m
effective clients means sum a_i^2 <= 1 / m: a multiplier mu of that constraint adds mu sum a_i^2 to eq. 5, which is the
same programme with sizes 1 / (lambda / n_i + mu) in place of n_i; the smallest mu that meets it is sought.
"""

import dataclasses
import math
from numbers import Real
from typing import Annotated, ClassVar, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts, as_sizes, as_target, effective_sample_size
from fedskew.mixing import Programme, Solution
from fedskew.parameters import FloatArray, Share, component
from fedskew.weighting import _from_sums
from fedskew.weighting._protocol import Answered, AskAll, Facts

SMALLEST, LARGEST, SPREAD, MET = 1e-15, 1e18, 1e-9, 1e-13
"""The multipliers mu that are tried, the relative accuracy of the one that is found, and that of the constraint."""

Sizes: TypeAlias = ArrayLike | None


def fedpals(
    counts: CountsLike, target: ArrayLike, strength: float = 0.0, sizes: Sizes = None, limit: float | None = None
) -> FloatArray:
    """FedPALS's weights.

    Args:
        counts: Label counts of the participants, shape `(clients, classes)`.
        target: Label mix, shape `(classes,)`; normalised here.
        strength: The paper's lambda, in samples, from 0 (its limit: of the weights that fit best, those of the largest
            effective sample size) to infinity (FedAvg).
        sizes: Samples of each client, shape `(clients,)`, where they are not the row sums of `counts`.
        limit: Upper limit on each weight; None: there is none. Equal weights where the clients are too few for it.

    Returns:
        Weights, shape `(clients,)`, sum 1; 0 for a client without samples.
    """
    return fedpals_solve(counts, target, strength, sizes, limit).weights


def fedpals_solve(
    counts: CountsLike, target: ArrayLike, strength: float = 0.0, sizes: Sizes = None, limit: float | None = None
) -> Solution:
    """FedPALS's weights with certificates of their optimality; arguments as in `fedpals`."""
    programme = _programme(counts, target, sizes, limit)
    if not _is_number(strength) or not strength >= 0:
        raise ArgumentError(f"strength: must be a number >= 0 (0: the limit, infinity: FedAvg), not {strength!r}")
    return programme.solve(strength / programme.samples)


def fedpals_strength(counts: CountsLike, target: ArrayLike, ess_fraction: float, sizes: Sizes = None) -> float:
    """Return the smallest strength whose effective sample size reaches a share of all samples, `ess_fraction`.

    It is right to 1e-9 and never below the share; 0 if the limit reaches it, and infinite where only FedAvg's weights
    do. The effective sample size never falls as the strength grows. FedPALS, appendix A.1, sets lambda this way.
    """
    programme = _programme(counts, target, sizes)
    if not _is_number(ess_fraction) or not 0 <= ess_fraction <= 1:
        raise ArgumentError(f"ess_fraction: must be a share from 0 to 1, not {ess_fraction!r}")
    return programme.kappa(ess_fraction) * programme.samples


def _programme(counts: CountsLike, target: ArrayLike, sizes: Sizes, limit: float | None = None) -> Programme:
    held = as_counts(counts)
    if limit is not None and not (_is_number(limit) and 0 < limit <= 1):
        raise ArgumentError(f"limit: must be above 0 and at most 1, not {limit!r}")
    return Programme(held, as_target(target, held.shape[1]), as_sizes(sizes, held), limit)


@component
class FedPALS:
    """Weights that bring the clients' weighted label mix near the target mix.

    Attributes:
        strength: The paper's lambda, in samples.
        ess: Where given, the strength is set anew in every round so that the effective sample size of the participants
            is this share of their samples.
        effective_clients: Where given, 1 / sum a^2 is at least this share of the participants that hold a sample: 1
            gives equal weights, 0.5 of ten clients the spread of five equal ones.
    """

    needs_target: ClassVar[bool] = True
    keeps_limit: ClassVar[bool] = True
    paper: ClassVar[str] = "Listo Zec et al., arXiv 2411.03799"
    needs_label_counts: ClassVar[bool] = True
    sums_mixes: ClassVar[bool] = True
    most_questions: ClassVar[int] = _from_sums.MOST_QUESTIONS
    least_clients: ClassVar[int] = _from_sums.LEAST_CLIENTS
    reveals: ClassVar[str | None] = (
        "its sums tell a server that only computes the exact label counts of a site that alone holds a class, or alone "
        "has weight 0"
    )

    strength: Annotated[float, Field(ge=0)] = 0.0
    ess: Share | None = None
    effective_clients: Share | None = None

    def __post_init__(self) -> None:
        if self.ess is not None and self.strength:
            raise ArgumentError("ess: sets the strength itself; give one of the two")

    def weigh(self, answered: Answered) -> FloatArray:
        """Return `fedpals` of the clients that replied."""
        return self.solve(answered)[0].weights

    def why_no_sums(self) -> str | None:
        """See `BySums.why_no_sums`."""
        if self.ess is not None or self.effective_clients is not None:
            return "ess and effective_clients take the counts themselves; set strength, in samples"
        if not 0 < self.strength < math.inf:
            return "strength has to be above 0 and finite, as its limits take the counts themselves"
        return None

    def announce(self, ask: AskAll, target: FloatArray | None, clients: int) -> dict[str, FloatArray]:
        """Solve the programme of all clients, in 2 to `MOST_QUESTIONS` questions; see `BySums.announce`."""
        if target is None:
            raise ArgumentError("target: FedPALS weighs clients towards a target label mix, and none is given")
        return _from_sums.solve(ask, target, self.strength, clients)

    def answer(self, counts: FloatArray, question: Facts) -> FloatArray:
        """See `BySums.answer`."""
        return _from_sums.answer(counts, question)

    def own_weight(self, counts: FloatArray, announced: Facts) -> float:
        """Return the client's weight, 0 without samples; see `BySums.own_weight`."""
        return _from_sums.weight(counts, announced)

    def solve(self, answered: Answered) -> tuple[Solution, float]:
        """Return the weights with certificates of their optimality, and the strength that they are for."""
        if answered.target is None:
            raise ArgumentError(
                "target: FedPALS weighs clients towards a target label mix, and none is given; set [target] mix, or "
                "choose a weighting that needs none (fedavg, fedla, uniform)"
            )
        programme = _programme(answered.counts, answered.target, answered.sizes, answered.limit)
        kappa = self.strength / programme.samples if self.ess is None else programme.kappa(self.ess)
        found, strength = programme.solve(kappa), kappa * programme.samples
        present = (as_counts(answered.counts).sum(axis=1) > 0) & (np.asarray(answered.sizes) > 0)
        least = (self.effective_clients or 0.0) * np.count_nonzero(present)
        if found.weights @ found.weights * least <= 1:
            return found, strength
        return _spread(answered, present, strength, least), strength


def _spread(answered: Answered, present: NDArray[np.bool_], strength: float, least: float) -> Solution:
    """Return the programme's weights with at least so many effective clients, where strength alone has fewer."""
    # At strength 0 the weights that fit best are spread first; only where these can't be, at the cost of the fit.
    sizes, target = np.where(present, answered.sizes, 1.0).astype(np.float64), np.asarray(answered.target)

    def at(mu: float, penalty: FloatArray, kappa: float | None) -> Solution:
        shown = np.where(present, 1 / (penalty + mu), 0.0)
        programme = _programme(answered.counts, target, shown, answered.limit)
        return programme.solve(1 / programme.samples if kappa is None else kappa)

    def is_met(found: Solution) -> bool:
        return bool(found.weights @ found.weights * least <= 1 + MET)

    kind: tuple[FloatArray, float | None] = (strength / sizes, None)
    if strength == math.inf:
        kind = (1 / sizes, math.inf)
    elif strength == 0 and is_met(at(LARGEST, 1 / sizes, 0.0)):
        kind = (1 / sizes, 0.0)
    high = SMALLEST
    while not is_met(best := at(high, *kind)) and high < LARGEST:
        high *= 10
    low = high / 10
    while high > low * (1 + SPREAD):
        middle = math.sqrt(low * high)
        if is_met(found := at(middle, *kind)):
            high, best = middle, found
        else:
            low = middle
    return dataclasses.replace(best, ess=float(effective_sample_size(best.weights, np.where(present, sizes, 0.0))))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
