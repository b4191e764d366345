"""FedEntOpt towards a target: cohorts whose pooled labels come near the target's label mix, in place of even ones.

Of FedEntOpt (see `_fedentopt`), with pool, buffer and ties as there, the entropy H of the pooled labels P gives way to
what it is for an even target, up to a constant: minus the divergence from the target mix q, in bits,

    -KL(P || q) = H(P) + sum over c of P_c log2 q_c

This is no paper's method: it is what lets selection and a weighting such as FedPALS go the same way. Shares of q below
e / C, with e = 0.001 and C classes, count as e / C, so that a client with a stray sample of a class that the target
lacks can be chosen. As long as a target's mix is not known (`[target] mix = "estimate"`), cohorts are even.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedskew.labels import CountsLike, as_target
from fedskew.parameters import FloatArray, IntArray, component
from fedskew.selection._fedentopt import FedEntOpt, FedEntOptState

_LEAST = 1e-3
"""The smallest share of the target, times the number of classes."""


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
