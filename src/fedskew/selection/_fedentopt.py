"""FedEntOpt: Lutz, Steidl, Mueller, Samek, "Boosting Federated Learning with FedEntOpt", Algorithm 1.

The first client is drawn uniformly. Each next one is the client with label counts l that maximise the entropy of the
cohort's summed label counts L, H((L + l) / |L + l|), in bits. Raw counts are summed, so large clients weigh more. A
client that took part can't be chosen again while it is in a first-in first-out buffer of Q clients, which persists
between rounds.

The paper is read literally: the candidates are determined at the start of a round and only become fewer within it, so a
client that leaves the buffer during a round can be chosen in the next one. The paper leaves some cases open: with
Q = 0 there is no buffer here; Q and a cohort that together exceed the number of clients are refused; of clients within
1e-12 bits the lowest id is chosen; an empty pool has entropy 0. The paper tries Q of 50 to 80 % of the clients and
finds 50 % best for Dirichlet splits and 70 % for a fixed number of labels.

For very many clients, `candidates` (not in the paper, off by default) restricts the greedy choice to that many of the
eligible clients, drawn uniformly in each round. The time to choose a cohort is then proportional to `candidates`, and
the cohort is hardly less even as long as they are many more than the cohort.

Towards a target (`FedEntOptTarget`, no paper's method: it lets selection and a weighting such as FedPALS go the same
way) the entropy H of the pooled labels P gives way to what it is for an even target, up to a constant: minus the
divergence from the target mix q, in bits,

    -KL(P || q) = H(P) + sum over c of P_c log2 q_c

Shares of q below e / C, with e = 0.001 and C classes, count as e / C, so that a client with a stray sample of a class
that the target lacks can be chosen. As long as a target's mix is not known (`[target] mix = "estimate"`), cohorts are
even.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts, as_target
from fedskew.parameters import BelowOne, Count, FloatArray, IntArray, component
from fedskew.selection._protocol import EVEN_LABELS, Checked, even_cohort

_LEAST = 1e-3
"""The smallest share of a target, times the number of classes."""


@dataclass(frozen=True)
class FedEntOptState:
    """Ids of the clients that can't be chosen, oldest first."""

    buffer: IntArray


@component
class FedEntOpt(Checked):
    """Greedy maximisation of the cohort's label entropy.

    Attributes:
        buffer: Q as a share of the clients, rounded down.
        candidates: Number of clients to choose from, drawn uniformly in each round from the clients outside the buffer;
            None: all clients outside the buffer.
    """

    paper: ClassVar[str] = "Lutz et al., arXiv 2411.01240"
    needs_label_counts: ClassVar[bool] = True
    warns: ClassVar[Mapping[str, str]] = EVEN_LABELS

    buffer: BelowOne = 0.5
    candidates: Count | None = None

    def init(self, counts: CountsLike) -> FedEntOptState:
        """Return an empty buffer."""
        as_counts(counts)
        return FedEntOptState(np.empty(0, dtype=np.int64))

    def _check(self, clients: int, size: int, first: int | None = None) -> None:
        super()._check(clients, size, first)
        capacity = self._capacity(clients)
        if capacity + size > clients:
            raise ArgumentError(
                f"buffer: {self.buffer:g} keeps {capacity} of {clients} clients out, which leaves fewer than the "
                f"cohort of {size}; the largest that works is {(clients - size) / clients:.12g}; or let no more "
                f"than {clients - capacity} take part in a round, training.participation = "
                f"{(clients - capacity) / clients:.12g}"
            )
        if self.candidates is not None and self.candidates < size:
            raise ArgumentError(f"candidates: {self.candidates} are fewer than the cohort of {size}")

    def _choose(
        self,
        state: FedEntOptState,
        counts: FloatArray,
        size: int,
        rng: np.random.Generator,
        first: int | None,
        bits: FloatArray | None = None,
    ) -> tuple[IntArray, FedEntOptState]:
        if first in state.buffer:
            raise ArgumentError(f"first: client {first} is in the buffer, so it can't be chosen this round")
        candidates = np.delete(np.arange(len(counts)), state.buffer)
        if self.candidates is not None and self.candidates < len(candidates):
            candidates = _drawn(candidates, self.candidates, rng, first)
        cohort = even_cohort(counts, candidates, size, rng.choice(candidates) if first is None else first, bits)
        remembered = np.concatenate([state.buffer, cohort])
        return cohort, FedEntOptState(remembered[max(0, len(remembered) - self._capacity(len(counts))) :])

    def _capacity(self, clients: int) -> int:
        return math.floor(self.buffer * clients + 1e-9)


@component
class FedEntOptTarget(FedEntOpt):
    """Greedy choice of a cohort whose pooled labels have the least divergence from the target mix (`[target] mix`).

    Attributes:
        buffer: Share of the clients that can't be chosen because they took part last, rounded down.
        candidates: Number of clients to choose from, drawn uniformly in each round from the clients outside the buffer;
            None: all clients outside the buffer.
    """

    paper: ClassVar[str] = "fedskew, after Lutz et al., arXiv 2411.01240"
    needs_target: ClassVar[bool] = True
    warns: ClassVar[Mapping[str, str]] = {}

    def select(
        self,
        state: FedEntOptState,
        counts: CountsLike,
        size: int,
        rng: np.random.Generator,
        first: int | None = None,
        target: FloatArray | None = None,
    ) -> tuple[IntArray, FedEntOptState]:
        """Choose a cohort; see `Selection.select`. `target` is the mix, `(classes,)`; None: not known yet."""
        held = self._checked(counts, size, rng, first)
        mix = None if target is None else as_target(target, held.shape[1])
        bits = None if mix is None else np.log2(np.maximum(mix, _LEAST / len(mix)))
        return self._choose(state, held, size, rng, first, bits)


def _drawn(clients: IntArray, number: int, rng: np.random.Generator, first: int | None) -> IntArray:
    """Draw a uniform sample of the clients, ascending; it contains `first` unless that is None."""
    if first is None:
        return np.sort(rng.choice(clients, number, replace=False, shuffle=False))
    others = rng.choice(clients[clients != first], number - 1, replace=False, shuffle=False)
    return np.sort(np.append(others, first))
