"""FedPALS (Listo Zec, Breitholtz, Johansson, "Overcoming label shift with target-aware federated learning").

    a = argmin  ||T - sum_i a_i S_i||^2 + lambda sum_i a_i^2 / n_i      (eq. 5)
        over a >= 0, sum a = 1

with S_i and n_i the label marginals and sizes of the participants, T the target mix and lambda the strength. A large
strength gives FedAvg. Strength 0 is the limit from above: of the weights that fit best, those with the largest
effective sample size (section 3.1, case 2); the problem as printed does not determine them. The authors' public
prototype differs: it does not square the distance, or penalises ||a||^2 / N (which tends to equal weights), and weighs
once with all clients.
"""

from __future__ import annotations

from numbers import Real
from typing import Annotated, ClassVar

from numpy.typing import ArrayLike
from pydantic import Field

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts, as_sizes, as_target
from fedskew.mixing import Programme, Solution
from fedskew.parameters import Share, component
from fedskew.weighting._protocol import Answered, FloatArray


def fedpals(counts: CountsLike, target: ArrayLike, strength: float = 0.0, sizes: ArrayLike | None = None) -> FloatArray:
    """FedPALS's weights.

    Args:
        counts: Label counts of the participants, shape `(clients, classes)`.
        target: Label mix, shape `(classes,)`; normalised here.
        strength: The paper's lambda, in samples, from 0 (its limit: of the weights that fit best, those of the largest
            effective sample size) to infinity (FedAvg).
        sizes: Samples of each client, shape `(clients,)`, where they are not the row sums of `counts`.

    Returns:
        Weights, shape `(clients,)`, sum 1; 0 for a client without samples.

    Raises:
        ArgumentError: Wrong shapes or values, or no client holds a sample.
    """
    return fedpals_solve(counts, target, strength, sizes).weights


def fedpals_solve(
    counts: CountsLike, target: ArrayLike, strength: float = 0.0, sizes: ArrayLike | None = None
) -> Solution:
    """FedPALS's weights with certificates of their optimality.

    Args:
        counts: As in `fedpals`.
        target: As in `fedpals`.
        strength: As in `fedpals`.
        sizes: As in `fedpals`.

    Returns:
        Weights, bounds on how far they are from optimal, effective sample size and distance to the target.

    Raises:
        ArgumentError: Wrong shapes or values, or no client holds a sample.
    """
    programme = _programme(counts, target, sizes)
    return programme.solve(_as_strength(strength) / programme.samples)


def fedpals_strength(
    counts: CountsLike, target: ArrayLike, ess_fraction: float, sizes: ArrayLike | None = None
) -> float:
    """The smallest strength whose effective sample size reaches a share of all samples.

    The effective sample size never falls as the strength grows, so a root is sought. FedPALS, appendix A.1, sets lambda
    this way.

    Args:
        counts: As in `fedpals`.
        target: As in `fedpals`.
        ess_fraction: Share of all samples, from 0 to 1. 1 is FedAvg, at infinite strength unless a finite one gives the
            same.
        sizes: As in `fedpals`.

    Returns:
        The strength, to a relative accuracy of 1e-9 and never below the share; 0 if the limit reaches it already.

    Raises:
        ArgumentError: Wrong shapes or values, or no client holds a sample.
    """
    programme = _programme(counts, target, sizes)
    return programme.kappa(_as_share(ess_fraction, "ess_fraction")) * programme.samples


def _programme(counts: CountsLike, target: ArrayLike, sizes: ArrayLike | None) -> Programme:
    held = as_counts(counts)
    return Programme(held, as_target(target, held.shape[1]), as_sizes(sizes, held))


@component
class FedPALS:
    """Weights that bring the clients' weighted label mix near the target mix.

    Attributes:
        strength: The paper's lambda, in samples.
        ess: Where given, the strength is set anew in every round so that the effective sample size of the participants
            is this share of their samples.
    """

    needs_target: ClassVar[bool] = True
    paper: ClassVar[str] = "Listo Zec et al., arXiv 2411.03799"
    needs_label_counts: ClassVar[bool] = True

    strength: Annotated[float, Field(ge=0)] = 0.0
    ess: Share | None = None

    def __post_init__(self) -> None:
        if self.ess is not None and self.strength:
            raise ArgumentError("ess: sets the strength itself; give one of the two")

    def weigh(self, answered: Answered) -> FloatArray:
        """Return `fedpals` of the clients that replied.

        Raises:
            ArgumentError: No target mix is given.
        """
        return self.solve(answered)[0].weights

    def solve(self, answered: Answered) -> tuple[Solution, float]:
        """Return the weights with certificates of their optimality, and the strength that they are for.

        Raises:
            ArgumentError: No target mix is given.
        """
        if answered.target is None:
            raise ArgumentError(
                "target: FedPALS weighs clients towards a target label mix, and none is given; set [target] mix, or "
                "choose a weighting that needs none (fedavg, fedla, uniform)"
            )
        programme = _programme(answered.counts, answered.target, answered.sizes)
        kappa = self.strength / programme.samples if self.ess is None else programme.kappa(self.ess)
        return programme.solve(kappa), kappa * programme.samples


def _as_strength(strength: float) -> float:
    if not _is_number(strength) or not strength >= 0:
        raise ArgumentError(f"strength: must be a number >= 0 (0: the limit, infinity: FedAvg), not {strength!r}")
    return strength


def _as_share(share: float, name: str) -> float:
    if not _is_number(share) or not 0 <= share <= 1:
        raise ArgumentError(f"{name}: must be a share from 0 to 1, not {share!r}")
    return share


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
