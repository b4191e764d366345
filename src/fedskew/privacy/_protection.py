"""The protection that clients agreed to: the noise of their updates, and their budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedskew.privacy._accounting import epsilon, most_rounds
from fedskew.privacy._noise import UpdateNoise

COVERED = (
    "updates of a client with all of its samples; not covered: label counts, weights, who takes part, and evaluations "
    "by clients"
)
"""What the epsilon of updates is about, in words."""


@dataclass(frozen=True)
class Protection:
    """The noise of clients' updates, and the budget beyond which a client takes part in no more rounds.

    Attributes:
        noise: What is done to every update.
        epsilon: The largest epsilon of a client.
    """

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
