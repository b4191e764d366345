"""The epsilon of rounds of the Gaussian mechanism, by the package dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from fedskew.errors import ArgumentError, MissingPackageError

MOST_ROUNDS = 1_000_000


@lru_cache(maxsize=4096)
def epsilon(noise: float, rounds: int, delta: float) -> float:
    """Compute the epsilon of a client that took part in so many rounds.

    Args:
        noise: The noise multiplier: standard deviation of the noise in a round's sum, divided by the sensitivity.
        rounds: Rounds in which the client took part, each after the others' results are known.

    Raises:
        ArgumentError: A number is out of its range.
        MissingPackageError: dp-accounting is not installed.
    """
    if not noise > 0:
        raise ArgumentError(f"noise: must be above 0, not {noise!r}")
    if not 0 < delta < 1:
        raise ArgumentError(f"delta: must be above 0 and below 1, not {delta!r}")
    if rounds < 0:
        raise ArgumentError(f"rounds: must be at least 0, not {rounds}")
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


def most_rounds(noise: float, budget: float, delta: float) -> int:
    """Count the rounds in which a client can take part before its epsilon is above a budget; at most a million."""
    if not budget > 0:
        raise ArgumentError(f"budget: must be above 0, not {budget!r}")
    low, high = 0, 1
    while high < MOST_ROUNDS and epsilon(noise, high, delta) <= budget:
        low, high = high, 2 * high
    high = min(high, MOST_ROUNDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(noise, middle, delta) <= budget else (low, middle)
    return low


def noise_for(budget: float, rounds: int, delta: float) -> float:
    """Compute the smallest noise multiplier for which a client can take part in so many rounds within a budget."""
    if not budget > 0:
        raise ArgumentError(f"budget: must be above 0, not {budget!r}")
    if rounds < 1:
        raise ArgumentError(f"rounds: must be at least 1, not {rounds}")
    if not 0 < delta < 1:
        raise ArgumentError(f"delta: must be above 0 and below 1, not {delta!r}")
    return float(_dp_accounting().get_sigma_gaussian(budget, delta)) * math.sqrt(rounds)


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise MissingPackageError("dp-accounting is not installed; pip install 'fedskew[dp]'") from None
    return dp_accounting
