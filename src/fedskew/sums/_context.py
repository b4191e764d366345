"""Which sum a mask belongs to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from fedskew.errors import ArgumentError

LEAST = 3
"""Fewest sites that a sum may be over, unless a site asks for more: in a sum over two, each learns the other's part."""

_PROTOCOL = "fedskew masked sums 1"


@dataclass(frozen=True)
class SumContext:
    """The identity of one masked sum, from which all of its masks are derived.

    Masks of two sites whose contexts differ in anything do not cancel, so nothing opens if a server tells sites, say,
    different members.

    Attributes:
        run: The run's id: no two runs of the same keys share one.
        round: Number of the round.
        attempt: Number of the attempt in this round, from 1.
        purpose: What is summed, such as "train" or "evaluate".
        members: Names of the sites that the sum is over; kept sorted.
        public: Anything else that all members must have been told alike, such as a hash of the model that was sent.

    Raises:
        ArgumentError: A member occurs twice, or a number is below 0.
    """

    run: str
    round: int
    attempt: int
    purpose: str
    members: tuple[str, ...]
    public: str = ""

    def __post_init__(self) -> None:
        members = tuple(sorted(self.members))
        if len(set(members)) < len(members):
            raise ArgumentError(f"members: each may occur once, not {', '.join(members)}")
        if self.round < 0 or self.attempt < 0:
            raise ArgumentError(f"round and attempt: must be at least 0, not {self.round} and {self.attempt}")
        object.__setattr__(self, "members", members)

    @property
    def digest(self) -> bytes:
        """SHA-256 of all attributes, 32 bytes."""
        said = [_PROTOCOL, self.run, self.round, self.attempt, self.purpose, list(self.members), self.public]
        return hashlib.sha256(json.dumps(said).encode()).digest()

    @property
    def name(self) -> str:
        """The sum's name in messages: purpose, round and attempt."""
        return f"{self.purpose}, round {self.round}, attempt {self.attempt}"
