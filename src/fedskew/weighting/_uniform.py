"""Equal weights: `a_k = 1 / participants`."""

from typing import ClassVar

import numpy as np

from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import FloatArray, component
from fedskew.weighting._protocol import Answered, AskAll, Facts, as_shares


def uniform(counts: CountsLike) -> FloatArray:
    """Return the same weight for every client that holds a sample, `(clients,)`, sum 1."""
    return as_shares(as_counts(counts).sum(axis=1) > 0, "counts")


@component
class Uniform:
    """Gives every client that holds a sample the same weight, as in SCAFFOLD's mean."""

    needs_label_counts: ClassVar[bool] = False
    weighs_equally: ClassVar[bool] = True
    most_questions: ClassVar[int] = 0
    least_clients: ClassVar[int] = 1
    reveals: ClassVar[str | None] = None
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"

    def weigh(self, answered: Answered) -> FloatArray:
        """Return equal weights of the clients that replied."""
        return as_shares(answered.sizes > 0, "sizes")

    def why_no_sums(self) -> str | None:
        """See `BySums.why_no_sums`."""
        return None

    def announce(self, ask: AskAll, target: FloatArray | None, clients: int) -> dict[str, FloatArray]:
        """Ask for nothing; see `BySums.announce`."""
        return {"clients": np.array([float(clients)])}

    def answer(self, counts: FloatArray, question: Facts) -> FloatArray:
        """Return nothing; see `BySums.answer`."""
        return np.zeros(0)

    def own_weight(self, counts: FloatArray, announced: Facts) -> float:
        """Return one client's share of all, 0 without samples; see `BySums.own_weight`."""
        return float(counts.sum() > 0) / float(announced["clients"][0])
