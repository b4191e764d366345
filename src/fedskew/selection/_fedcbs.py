"""Fed-CBS: cohorts drawn at random, the more probable the more even their pooled labels are.

Zhang et al., "Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via Class-Imbalance
Reduction", ICML 2023. Of a cohort M with pooled label counts L, N samples and C classes, the paper's QCID is

    Q(M) = ||L / N - 1/C||^2 = sum_{i,j in M} <l_i, l_j> / N^2 - 1/C .

In round k the clients c_1, c_2, ... are drawn one by one from those that are left:

    P(c_1) ~ 1 / Q({c_1})^(b_1) + lambda sqrt(3 ln k / (2 T))                    P(c_m) ~ 1 / Q(M + {c_m})^(b_m)

with b_1 < b_2 < ..., and T how often a client was chosen. P(c_m) is divided by the earlier factors too, which
are the same for all candidates and so leave no trace. The second term brings clients in as the first of a cohort,
unless one is even by itself: its 1 / Q is 1e12 here, and it always comes first. Greedy selection always ends in one
cohort; this leaves its path now and then. In the paper's example (figure 3) it draws the even cohort that greedy
selection misses in 7 % of rounds.

Only inner products <l_i, l_j> of the clients' label counts enter, which the paper has derived under homomorphic
encryption. Here they are those of the label counts that the server has, and no matrix of all pairs is made. The
authors published no code that we found, and of the paper's own text we read the abstract and figure 3 only: the
formulas are those of three public implementations (`docs/choices.md`), two of which have b_m = m, and one lambda = 10,
the values here; T begins at 1, as in two. Q below 1e-12 counts as 1e-12. A client without samples would leave Q as it
is, and so be preferred to most; it is chosen where nobody else is left.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import FloatArray, IntArray, NonNegative, Positive, component
from fedskew.selection._protocol import EVEN_LABELS, TIE, Checked


@dataclass(frozen=True)
class FedCBSState:
    """The number of cohorts chosen so far, and how often each client was chosen, `(clients,)`."""

    round: int
    chosen: IntArray


@component
class FedCBS(Checked):
    """Random draws that favour clients whose labels make the cohort's even.

    Attributes:
        exploration: The paper's lambda, which favours clients that were seldom chosen as the cohort's first.
        exponent: The paper's b_1; b_m is m times it. The larger, the nearer to a greedy choice.
    """

    paper: ClassVar[str] = "Zhang et al., ICML 2023"
    needs_label_counts: ClassVar[bool] = True
    warns: ClassVar[Mapping[str, str]] = EVEN_LABELS

    exploration: NonNegative = 10.0
    exponent: Positive = 1.0

    def init(self, counts: CountsLike) -> FedCBSState:
        """Return a state in which no client was chosen."""
        return FedCBSState(0, np.zeros(len(as_counts(counts)), dtype=np.int64))

    def _choose(
        self, state: FedCBSState, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, FedCBSState]:
        cohort, round = list[int](), state.round + 1
        sizes, squares = counts.sum(axis=1), np.einsum("ij,ij->i", counts, counts)
        empty, pooled = sizes == 0, np.zeros(counts.shape[1])
        while len(cohort) < size:
            totals = sizes + pooled.sum()  # of the cohort with each client
            products = squares + 2 * np.einsum("ij,j->i", counts, pooled) + pooled @ pooled
            shares = np.divide(products, totals**2, out=np.ones_like(totals), where=totals > 0)
            imbalances = np.maximum(shares - 1 / counts.shape[1], TIE)
            logs = -self.exponent * (len(cohort) + 1) * np.log(imbalances)
            if not cohort:
                bonus = self.exploration * np.sqrt(3 * math.log(round) / (2 * (1.0 + state.chosen)))
                logs = np.logaddexp(logs, np.log(bonus, where=bonus > 0, out=np.full(len(counts), -np.inf)))
            logs[cohort] = -np.inf
            if np.isfinite(logs[~empty]).any():
                logs[empty] = -np.inf
            client = _drawn(logs, rng) if cohort or first is None else int(first)
            pooled += counts[client]
            cohort.append(client)
        ids = np.array(cohort, dtype=np.int64)
        chosen = state.chosen.copy()
        chosen[ids] += 1
        return ids, FedCBSState(round, chosen)


def _drawn(logs: FloatArray, rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to exp(logs)."""
    ends = np.cumsum(np.exp(logs - logs.max()))
    return int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
