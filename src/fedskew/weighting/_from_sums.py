"""FedLA's and FedPALS's weights where no client reveals its label counts: the server only gets sums over all clients.

**FedLA.** Every client is told S, the sum of all counts. Client i computes W_i = sum_c n_ic / S_c itself; its weight is
W_i / sum W. Where the classes are balanced overall and all S_c are alike, W_i is its number of samples: FedAvg.

**FedPALS.** With p_i = n_i / N, kappa = strength / N, client i's mix S_i, and S~_i = (S_i, 1), the weights are

    a_i = (p_i / kappa) max(0, S~_i . z),      z = argmax  (T, 1) . z - ||u||^2 / 2 - v / 2,      z = (u, m)
    v   = sum_i a_i S~_i . z,                  gradient (T, 1) - (u, 0) - sum_i a_i S~_i

so an exchange of classes + 2 sums (of a_i S~_i and of a_i S~_i . z) gives value and gradient. The first exchange is of
N and of the second moments sum_i n_i S~_i S~_i', whose ridge solution is where BFGS starts, in the coordinates in which
that problem is round.

FedPALS's sums do not hide everybody, however many clients there are, and real sites take part in them with noisy counts
alone (`reveals`). The moments have a row for each class, sum_i n_ic S~_i: of a class that one client alone holds it is
that client's mix times its n_ic, hence its exact counts, and of one that it holds nearly alone, nearly these. And the
moments, times z, less N kappa times a later exchange are the sum of n_i S~_i (S~_i . z) over the clients with a_i = 0:
where that is one client alone, they tell its exact counts, too. Both to a server that only computes. FedAvg and FedLA
are asked for totals alone. Totals over N and over N - 1 clients (another run, made-up clients) tell the last one's
counts, and the sums of as many cohorts as there are clients everybody's. So this is for a run's start, over all clients
and never over a cohort, and is refused for fewer than ten; weights of a cohort are these, renormalised. Noisy counts
(`labels.privatize`) have no such limits and are the default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.labels import as_target
from fedskew.weighting._protocol import Facts, FloatArray

LEAST_CLIENTS = 10
"""Fewest clients whose sums are asked for."""


class Question(NamedTuple):
    """A question to all clients, whose answers (`fedpals_answer`) the server gets as one sum.

    Attributes:
        direction: z, shape `(classes + 1,)`; None in the first exchange.
        kappa: The strength divided by the number of samples of all; 0 in the first exchange.
        samples: The number of samples of all, N; 0 in the first exchange.
    """

    direction: FloatArray | None = None
    kappa: float = 0.0
    samples: float = 0.0

    def facts(self) -> dict[str, FloatArray]:
        """Return a later question as named numbers."""
        assert self.direction is not None, "the first question says nothing"
        return {
            "direction": self.direction,
            "kappa": np.array([self.kappa]),
            "samples": np.array([self.samples]),
        }

    @classmethod
    def of(cls, facts: Facts) -> Question:
        """Read a question; no numbers are the first one.

        Args:
            facts: What `facts` returned.
        """
        if not facts:
            return cls()
        return cls(facts["direction"], float(facts["kappa"][0]), float(facts["samples"][0]))


class FromSums(NamedTuple):
    """FedPALS's solution, from which every client computes its own weight (`fedpals_weight`).

    Attributes:
        question: The last question.
        exchanges: How often the clients were asked.
    """

    question: Question
    exchanges: int


def fedla_share(counts: ArrayLike, totals: ArrayLike) -> float:
    """Compute FedLA's W of one client, from its own counts and the sums of all clients' counts.

    Args:
        counts: The client's label counts, shape `(classes,)`.
        totals: Sums over all clients, shape `(classes,)`; none below the client's own.

    Returns:
        W: the sum over classes of the client's share of that class. All clients' sum is the number of classes held.

    Raises:
        ArgumentError: Wrong shapes or values.

    Example:
        share = fedla_share(own, totals)    # the client sends (share * update, share); both are only summed
    """
    own, pooled = _counts(counts, "counts"), _counts(totals, "totals")
    if own.shape != pooled.shape:
        raise ArgumentError(f"totals: expected shape {own.shape}, got {pooled.shape}")
    if (own > pooled * (1 + 1e-12)).any():
        raise ArgumentError("totals: are below the client's own counts, so they are not of all clients")
    return float(np.sum(np.divide(own, pooled, out=np.zeros_like(own), where=pooled > 0)))


class FromTotals:
    """The part of `BySums` that weightings from the sum of all label counts share."""

    most_questions: ClassVar[int] = 1
    least_clients: ClassVar[int] = LEAST_CLIENTS
    reveals: ClassVar[str | None] = None

    def why_no_sums(self) -> str | None:
        """See `BySums.why_no_sums`."""
        return None

    def announce(
        self, ask: Callable[[Facts], FloatArray], target: FloatArray | None, clients: int
    ) -> dict[str, FloatArray]:
        """Ask for the sum of all label counts; see `BySums.announce`."""
        _check_enough(clients, self.least_clients)
        totals = ask({})
        if not totals.sum() > 0:
            raise ArgumentError("counts: no client holds a sample")
        return {"totals": totals}

    def answer(self, counts: FloatArray, question: Facts) -> FloatArray:
        """Return the label counts; see `BySums.answer`."""
        return counts


def fedpals_answer(counts: ArrayLike, question: Question) -> FloatArray:
    """Compute one client's answer, which leaves the client only as part of a sum.

    Args:
        counts: The client's label counts, shape `(classes,)`.
        question: What the server asked.

    Returns:
        n S~ S~', shape `(classes + 1, classes + 1)`, to the first question; else a S~ and a S~ . z, shape `(classes +
        2,)`. Zeros without samples.

    Raises:
        ArgumentError: Wrong shapes or values.
    """
    own = _counts(counts, "counts")
    mix = _mix(own)
    if question.direction is None:
        moments: FloatArray = own.sum() * np.outer(mix, mix)
        return moments
    weight = fedpals_weight(own, question)
    return weight * np.append(mix, mix @ question.direction)


def fedpals_weight(counts: ArrayLike, question: Question) -> float:
    """Compute one client's weight from a question.

    Args:
        counts: The client's label counts, shape `(classes,)`.
        question: The question; that of `FromSums` for FedPALS's weights, which sum to 1 over all clients.

    Returns:
        The weight, a.

    Raises:
        ArgumentError: Wrong shapes or values.
    """
    own = _counts(counts, "counts")
    if question.direction is None or question.direction.shape != (own.size + 1,):
        raise ArgumentError(f"question: expected a direction of shape ({own.size + 1},)")
    return float(own.sum() / (question.samples * question.kappa) * max(0.0, _mix(own) @ question.direction))


def fedpals_from_sums(
    ask: Callable[[Question], FloatArray],
    target: ArrayLike,
    strength: float,
    clients: int,
    tolerance: float = 1e-8,
) -> FromSums:
    """Solve FedPALS's programme from sums over clients.

    Args:
        ask: Sends a question to all clients and returns the sum of their answers.
        target: Label mix, shape `(classes,)`; normalised here.
        strength: The paper's lambda, in samples, above 0.
        clients: Number of clients that the sums are over.
        tolerance: The gradient's largest component to stop at, in the problem's own scale.

    Returns:
        The solution.

    Raises:
        ArgumentError: There are fewer than ten clients, the strength is not above 0 and finite, no client holds a
            sample, or the target is not valid.
    """
    from scipy.optimize import minimize

    _check_enough(clients, LEAST_CLIENTS)
    if not 0 < strength < np.inf:
        raise ArgumentError(
            f"strength: must be above 0 and finite, not {strength!r}; the limit 0 needs the counts themselves"
        )
    moments = ask(Question())
    classes, samples = len(moments) - 1, float(moments[-1, -1])
    if not samples > 0:
        raise ArgumentError("counts: no client holds a sample")
    kappa, exchanges = strength / samples, 1
    aim = np.append(as_target(target, classes), 1.0)
    held = np.append(np.ones(classes), 0.0)
    factor = np.linalg.cholesky(np.diag(held) + moments / strength + 1e-12 * np.eye(classes + 1))

    def missing(scaled: FloatArray) -> tuple[float, FloatArray]:
        nonlocal exchanges
        exchanges += 1
        direction = np.linalg.solve(factor.T, scaled)
        answer = ask(Question(direction, kappa, samples))
        value = (held * direction) @ direction / 2 + answer[-1] / 2 - aim @ direction
        gradient = held * direction + answer[:-1] - aim
        return float(value), np.linalg.solve(factor, gradient)

    start = np.linalg.solve(factor, aim)
    found = minimize(missing, start, jac=True, method="BFGS", options={"gtol": tolerance, "maxiter": 200})
    return FromSums(Question(np.linalg.solve(factor.T, found.x), kappa, samples), exchanges)


def _check_enough(clients: int, least: int) -> None:
    if clients < least:
        raise ArgumentError(
            f"clients: {clients} are too few, as the sums would tell their counts; ask {least} or more, or have noise "
            "added to their counts (labels.privatize)"
        )


def _mix(own: FloatArray) -> FloatArray:
    """S~, or zeros without samples."""
    total = own.sum()
    return np.append(own / total, 1.0) if total > 0 else np.zeros(own.size + 1)


def _counts(values: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not (np.isfinite(array) & (array >= 0)).all():
        raise ArgumentError(f"{name}: expected a finite number for each class, none negative, got shape {array.shape}")
    return array
