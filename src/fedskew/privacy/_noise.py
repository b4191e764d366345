"""Clipping, a client's share of the noise, what rounds of it cost, and the protection that clients agreed to."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, optional
from fedskew.parameters import Between, Count, Positive, PositiveShare, Size, checked, component
from fedskew.sums.fixed_point import UPDATES

LEAST_SHARE = 10.0
"""Smallest share of the noise, in units of 2**-24: sums of smaller ones, of whole numbers, are no Gaussian."""

_DEVIATIONS = 8
"""A sum's noise of so many standard deviations still fits into 32 bits."""


@component
class UpdateNoise:
    """Clipping and noise of every update before it is added up; see the package's formula.

    Attributes:
        clip: Largest Euclidean norm of an update, C.
        noise: The noise multiplier, z.
        weight_limit: Largest weight of a client, a.
        answers: Number of clients whose shares of noise are the mechanism's, m: with fewer, nothing may be opened, and
            with more the noise is larger. None: those that are in the sum, however many.

    Raises:
        ArgumentError: A number is out of its range, or the noise does not fit into the sums' 32 bits.
    """

    clip: Positive
    noise: Positive
    weight_limit: PositiveShare
    answers: Count | None = None

    def __post_init__(self) -> None:
        if self.clip > UPDATES.limit:
            raise ArgumentError(
                f"clip: must be at most {UPDATES.limit:g}, to which each coordinate is clipped, not {self.clip:g}"
            )
        largest = self.clip + _DEVIATIONS * self.noise * self.weight_limit * self.clip
        if largest >= 2.0 ** (UPDATES.bits - 1 - UPDATES.fraction):
            raise ArgumentError(
                f"noise: {self.noise:g} with clip {self.clip:g} does not fit into a sum's {UPDATES.bits} bits"
            )

    def deviation(self, parameters: int) -> float:
        """Compute the standard deviation of a sum's noise, s, in units of 2**-24."""
        return self.noise * (2.0**UPDATES.fraction * self.weight_limit * self.clip + math.sqrt(parameters) / 2)

    def share(self, parameters: int, members: int | None = None) -> float:
        """Compute the standard deviation of one client's share of the noise, in units of 2**-24.

        ArgumentError where nobody says by how many clients the noise is shared, or a share is below ten units, so that
        epsilon would not hold of whole numbers.
        """
        shares = self.answers or members
        if shares is None or shares < 1:
            raise ArgumentError(f"members: must be at least 1, as they share the noise, not {members!r}")
        share = self.deviation(parameters) / math.sqrt(shares)
        if share < LEAST_SHARE:
            raise ArgumentError(
                f"noise: the share of one of {shares} clients is {share:.3g} units of 2**-24, and {LEAST_SHARE:g} are "
                "the least whose sum is as good as the Gaussian that is accounted for; raise noise, clip or "
                "weight_limit"
            )
        return share

    def protect(
        self, update: ArrayLike, weight: float, rng: np.random.Generator | None = None, members: int | None = None
    ) -> NDArray[np.int32]:
        """Clip, weigh and encode an update, and add this client's share of the noise.

        Args:
            rng: Source of reproducible noise, for simulation only. Without it the noise is exactly the discrete
                Gaussian of opendp's secure mechanism (extra `fedskew[dp]`).
            members: Number of clients in the sum, where `answers` is None.

        Returns:
            Integers to add up, modulo 2**32, and to decode by `fixed_point.UPDATES`.

        Raises:
            ArgumentError: The weight is above the limit, a value is not finite, or a share can't be had (see `share`).
            MissingPackageError: opendp is needed and not installed.
        """
        if weight > self.weight_limit * (1 + 1e-9):
            limit = self.weight_limit
            raise ArgumentError(f"weight: {weight:.4g} is above the limit {limit:.4g} that the noise is made for")
        wide = np.asarray(update, dtype=np.float64)
        share = self.share(wide.size, members)
        norm = float(np.linalg.norm(wide))
        encoded = UPDATES.encode(wide * min(1.0, self.clip / norm) if norm > 0 else wide, weight)
        rounded = None if rng is None else np.rint(rng.normal(scale=share, size=wide.size)).astype(np.int64)
        noise = _discrete_gaussian(wide.size, share) if rounded is None else rounded
        return (encoded + noise).astype(np.int32)


def _discrete_gaussian(size: int, scale: float) -> NDArray[np.int64]:
    dp = secure_noise()
    mechanism = dp.m.make_gaussian(dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float), scale=scale)
    return np.array(mechanism([0] * size), dtype=np.int64)


def secure_noise() -> Any:
    """Import opendp's mechanisms, which draw the noise of real sites; MissingPackageError without them."""
    why = "opendp is not installed; pip install 'fedskew[dp]', or pass a seeded rng (for simulation only)"
    dp = optional("opendp.prelude", why)
    dp.enable_features("contrib")
    return dp


MOST_ROUNDS = 1_000_000


@lru_cache(maxsize=4096)
@checked
def epsilon(noise: Positive, rounds: Size, delta: Between) -> float:
    """Compute the epsilon of a client that took part in so many rounds, each after the others' results are known.

    The noise multiplier is the standard deviation of the noise in a round's sum, divided by the sensitivity. Raises
    MissingPackageError where dp-accounting is not installed.
    """
    if rounds == 0:
        return 0.0
    # So many Gaussian mechanisms are exactly one with so much less noise (Dong, Roth & Su, 2022, corollary 3.3).
    return float(_dp_accounting().get_epsilon_gaussian(noise / math.sqrt(rounds), delta))


def together(noises: Iterable[float]) -> float:
    """Compute the noise multiplier of the one Gaussian mechanism that costs as much as several.

        epsilon(together(noises), 1, delta)     # of mechanisms that are composed one after another

    It is 1 / sqrt(sum of 1 / noise**2) (Dong, Roth & Su, 2022, corollary 3.3).
    """
    inverse = [noise**-2 if noise > 0 else math.nan for noise in noises]
    if not inverse or math.isnan(math.fsum(inverse)):
        raise ArgumentError("noises: expected one at least, each above 0")
    return 1 / math.sqrt(math.fsum(inverse))


@checked
def most_rounds(noise: float, budget: Positive, delta: float) -> int:
    """Count the rounds in which a client can take part before its epsilon is above a budget; at most a million."""
    low, high = 0, 1
    while high < MOST_ROUNDS and epsilon(noise, high, delta) <= budget:
        low, high = high, 2 * high
    high = min(high, MOST_ROUNDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(noise, middle, delta) <= budget else (low, middle)
    return low


@checked
def noise_for(budget: Positive, rounds: Count, delta: Between) -> float:
    """Compute the smallest noise multiplier for which a client can take part in so many rounds within a budget."""
    return float(_dp_accounting().get_sigma_gaussian(budget, delta)) * math.sqrt(rounds)


def _dp_accounting() -> Any:
    return optional("dp_accounting", "dp-accounting is not installed; pip install 'fedskew[dp]'")


COVERED = (
    "updates of a client with all of its samples; not covered: label counts, weights, who takes part, and evaluations "
    "by clients"
)
"""What the epsilon of updates is about, in words."""


@dataclass(frozen=True)
class Protection:
    """The noise of clients' updates, and the epsilon beyond which a client takes part in no more rounds."""

    noise: UpdateNoise
    epsilon: float
    delta: float

    @cached_property
    def most_rounds(self) -> int:
        """Rounds in which a client can take part."""
        return most_rounds(self.noise.noise, self.epsilon, self.delta)

    def spent(self, rounds: int) -> float:
        """Compute the epsilon of a client that took part in so many rounds."""
        return epsilon(self.noise.noise, rounds, self.delta)
