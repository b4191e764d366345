"""FedLA's and FedPALS's weights where no client reveals its label counts: the server only gets sums over all clients.

**FedLA.** Every client is told S, the sum of all counts. Client i computes W_i = sum_c n_ic / S_c itself; its weight is
W_i / sum W. Where the classes are balanced overall and all S_c are alike, W_i is its number of samples: FedAvg.

**FedPALS.** With p_i = n_i / N, kappa = strength / N, client i's mix S_i, and S~_i = (S_i, 1), the weights are

    a_i = (p_i / kappa) max(0, S~_i . z),      z = argmax  (T, 1) . z - ||u||^2 / 2 - v / 2,      z = (u, m)
    v   = sum_i a_i S~_i . z,                  gradient (T, 1) - (u, 0) - sum_i a_i S~_i

so an exchange of classes + 1 sums, of a_i S~_i, gives the gradient. The first exchange is of N and of the second
moments sum_i n_i S~_i S~_i'. With those of the clients whose weight is above 0, M, the solution is that of (I0 + M /
strength) z = (T, 1), where I0 is the identity but for the last 0. M is corrected after each exchange by what it should
have predicted (SR1, exact where one client comes or goes), while kappa falls from where nearly all clients have weight.
As kappa falls S~_i . z gets as small, a difference of numbers that don't: z is therefore told in two parts, the second
far below the first.

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

import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import ArgumentError
from fedskew.labels import as_target
from fedskew.parameters import FloatArray
from fedskew.weighting._protocol import AskAll, Facts

LEAST_CLIENTS = 10
"""Fewest clients whose sums are asked for."""

MOST_QUESTIONS = 200
"""Most questions of FedPALS, after which it takes the weights that it has."""

EASY, FAR, NEAR = 0.1, 100.0, 2.0
"""The kappa to begin with, and by what it is divided where no client came or went, and where one did."""

ROUGH, FINE, NOISE = 1e-2, 1e-7, 1e-9
"""The error of the weights before the last kappa and at it, and what is too small to correct moments by."""


class FromTotals:
    """The part of `BySums` that weightings from the sum of all label counts share."""

    most_questions: ClassVar[int] = 1
    least_clients: ClassVar[int] = LEAST_CLIENTS
    reveals: ClassVar[str | None] = None

    def why_no_sums(self) -> str | None:
        """See `BySums.why_no_sums`."""
        return None

    def announce(self, ask: AskAll, target: FloatArray | None, clients: int) -> dict[str, FloatArray]:
        """Ask for the sum of all label counts; see `BySums.announce`."""
        check_enough(clients, self.least_clients)
        totals = ask({})
        if not totals.sum() > 0:
            raise ArgumentError("counts: no client holds a sample")
        return {"totals": totals}

    def answer(self, counts: FloatArray, question: Facts) -> FloatArray:
        """Return the label counts; see `BySums.answer`."""
        return counts


def answer(counts: ArrayLike, question: Facts) -> FloatArray:
    """Compute one client's answer to FedPALS's question: n S~ S~' to the first, without numbers, else a S~."""
    own = checked(counts)
    total = own.sum()
    mix = np.append(own / total, 1.0) if total > 0 else np.zeros(own.size + 1)
    return weight(own, question) * mix if question else total * np.outer(mix, mix)


def weight(counts: ArrayLike, question: Facts) -> float:
    """Compute one client's weight from a question: z as `direction` and `rest`, kappa, and all clients' samples."""
    own = checked(counts)
    direction, rest = (question.get(name, np.zeros(0)) for name in ("direction", "rest"))
    if not direction.shape == rest.shape == (own.size + 1,):
        raise ArgumentError(f"question: expected a direction and its rest of shape ({own.size + 1},)")
    amounts = np.append(own, own.sum())
    product = amounts * direction
    (high, low), (of_high, of_low) = _halves(amounts), _halves(direction)
    lost = ((high * of_high - product) + high * of_low + low * of_high) + low * of_low  # by rounding (Dekker)
    along = math.fsum([*product, *lost, *(amounts * rest)])
    return max(0.0, along) / float(question["samples"][0] * question["kappa"][0])


def solve(ask: AskAll, target: ArrayLike, strength: float, clients: int) -> dict[str, FloatArray]:
    """Solve FedPALS's programme from sums over clients: the question whose `weight` is each client's, until the sum of
    the weights' errors is `FINE`."""
    check_enough(clients, LEAST_CLIENTS)
    if not 0 < strength < np.inf:
        raise ArgumentError(
            f"strength: must be above 0 and finite, not {strength!r}; the limit 0 needs the counts themselves"
        )
    moments = ask({})
    classes, samples = len(moments) - 1, float(moments[-1, -1])
    if not samples > 0:
        raise ArgumentError("counts: no client holds a sample")
    aim, held = np.append(as_target(target, classes), 1.0), np.append(np.ones(classes), 0.0)
    last, moments, exchanges = strength / samples, moments / samples, 1
    kappa = max(last, EASY)
    direction, rest = _newton(np.diag(held) + moments / kappa, aim), np.zeros(classes + 1)

    before = np.zeros(classes + 1), np.zeros(classes + 1)

    def question(at: float) -> dict[str, FloatArray]:
        return {"direction": direction, "rest": rest, "kappa": np.array([at]), "samples": np.array([samples])}

    def gradient() -> FloatArray:
        """Ask, and correct the moments of the clients that have weight: by this answer, and by what changed."""
        nonlocal before, exchanges, moments
        exchanges += 1
        told = ask(question(kappa))
        now = direction + rest, kappa * told
        for along, here in (now, (now[0] - before[0], now[1] - before[1])):
            missing = here - moments @ along
            if abs(missing @ along) > NOISE * np.linalg.norm(missing) * np.linalg.norm(along):
                moments = moments + np.outer(missing, missing) / (missing @ along)
        before = now
        found: FloatArray = (held * direction - aim + told) + held * rest
        return found

    def move(step: FloatArray) -> None:
        nonlocal direction, rest
        moved = direction + step
        lost = (direction - (moved - (moved - direction))) + (step - (moved - direction)) + rest
        direction = moved + lost
        rest = lost - (direction - moved)

    while True:
        now, calm = gradient(), True
        while exchanges < MOST_QUESTIONS:
            step = _newton(np.diag(held) + moments / kappa, -now)
            fall = -float(now @ step)
            if fall <= (FINE if kappa == last else ROUGH) ** 2 * kappa:
                break
            move(step)
            now, calm, taken = gradient(), False, 1.0
            while now @ step > 0.9 * fall and exchanges < MOST_QUESTIONS:  # too far: back to where the slope is 0
                shorter = taken * fall / (fall + float(now @ step))
                move((shorter - taken) * step)
                now, taken = gradient(), shorter
        if kappa == last or exchanges >= MOST_QUESTIONS:
            return question(last)
        kappa = max(last, kappa / (FAR if calm else NEAR))
        move(
            _newton(
                np.diag(held) + moments / kappa, aim - held * (direction + rest) - moments @ (direction + rest) / kappa
            )
        )


def _newton(curvature: FloatArray, slope: FloatArray) -> FloatArray:
    """Solve with a symmetric matrix, as if none of its eigenvalues were below 0, or nearly 0."""
    values, vectors = np.linalg.eigh(curvature)
    values = np.maximum(np.abs(values), 1e-14 * np.abs(values).max())
    found: FloatArray = vectors @ ((vectors.T @ slope) / values)
    return found


def _halves(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Split numbers into two of 26 bits each, whose products are exact (Veltkamp)."""
    high = values * (2.0**27 + 1)
    high = high - (high - values)
    return high, values - high


def check_enough(clients: int, least: int) -> None:
    """Refuse sums over so few clients that they tell one's counts."""
    if clients < least:
        raise ArgumentError(
            f"clients: {clients} are too few, as the sums would tell their counts; ask {least} or more, or have noise "
            "added to their counts (labels.privatize)"
        )


def checked(counts: ArrayLike) -> FloatArray:
    """Return one client's counts, `(classes,)`, as float64."""
    array = np.asarray(counts, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not (np.isfinite(array) & (array >= 0)).all():
        raise ArgumentError(f"counts: expected a finite number for each class, none negative, got shape {array.shape}")
    return array
