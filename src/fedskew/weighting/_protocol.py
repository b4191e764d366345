"""The protocol of a weighting, and what it receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedskew.errors import ArgumentError
from fedskew.parameters import FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor


class Answered(NamedTuple):
    """The clients that replied in a round.

    Attributes:
        counts: Their label counts, shape `(answered, classes)`.
        sizes: Their numbers of samples, shape `(answered,)`.
        target: The label mix that the model is for, shape `(classes,)`, or None.
        ids: Which clients they are, shape `(answered,)`.
        state: What the weighting keeps between rounds (see `fedskew.hooks`).
        limit: Upper limit on a client's weight, which the engine applies to whatever a weighting returns (`limited`); a
            weighting that optimises can do so under it. None: there is no limit.
    """

    counts: FloatArray
    sizes: FloatArray
    target: FloatArray | None = None
    ids: IntArray = np.zeros(0, dtype=np.int64)
    state: Mapping[str, Tensor] = {}
    limit: float | None = None


class Weighting(Protocol):
    """A component of the weighting slot: a frozen dataclass of hyper-parameters.

    One that reads the target label mix declares `needs_target`, so that a run without a target is refused.
    """

    def weigh(self, answered: Answered) -> FloatArray:
        """Return the weights of a round's clients, `(answered,)`, none negative, sum 1."""


Facts = Mapping[str, FloatArray]
"""Named numbers that the server tells all clients alike: a question, or what was announced of its answers."""

AskAll = Callable[[Facts], FloatArray]


@runtime_checkable
class BySums(Protocol):
    """A weighting whose weights clients compute by themselves, from sums over all of them: nobody shows label counts.

    The server asks once, before the first round, and announces the same numbers to all clients (`announce`). A client's
    own weight is its share of all clients; those of a round are divided by their sum. One whose weights for a part of
    the clients are others declares `weighs_everyone`, and takes whole federations only.

    Attributes:
        most_questions: Most questions that `announce` asks.
        least_clients: Fewest clients that it asks.
        reveals: What its sums of exact counts tell of one client, for which real sites add noise to their counts
            first; None: no more than totals do.
    """

    most_questions: ClassVar[int]
    least_clients: ClassVar[int]
    reveals: ClassVar[str | None]

    def why_no_sums(self) -> str | None:
        """Say why these parameters need the counts themselves; None: they don't."""

    def announce(self, ask: AskAll, target: FloatArray | None, clients: int) -> dict[str, FloatArray]:
        """Ask the clients, and return the numbers that all of them get.

        Args:
            ask: Sends a question to all clients, and returns the sum of their answers.
            target: The label mix that the model is for, shape `(classes,)`, or None.
            clients: Number of clients.
        """

    def answer(self, counts: FloatArray, question: Facts) -> FloatArray:
        """Answer a question at the client, whose counts are `(classes,)`: the numbers that enter the sums."""

    def own_weight(self, counts: FloatArray, announced: Facts) -> float:
        """Compute a client's share of all clients from what was announced, at the client; those of all sum to 1."""


def as_shares(amounts: NDArray[Any], argument: str) -> FloatArray:
    """Return each client's amount as a share of all, sum 1; ArgumentError about an argument where all are 0."""
    total = amounts.sum()
    if not total > 0:
        raise ArgumentError(f"{argument}: no client holds a sample")
    shares: FloatArray = amounts / total
    return shares
