"""The interface of selections, the checks that they share, and the greedy choice of an even cohort.

Let p be the pooled label counts of the clients chosen so far and S their sum, x a client's label counts and n their
sum, and g(t) = t log2 t. The entropy of p + x is

    H = log2(S + n) - (sum_c g(p_c) + sum_{c: x_c > 0} [g(p_c + x_c) - g(p_c)]) / (S + n),

so that only the classes that a client holds need to be looked at.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts
from fedskew.parameters import FloatArray, IntArray

EVEN_LABELS: Mapping[str, str] = {
    "weighting.needs_target": "cohorts are chosen for even labels and weighed towards the target mix, so the goals "
    "conflict unless the target is even; take the selection fedentopt_target, or uniform, which leaves the mix to the "
    "weighting"
}
"""The warning of selections that make a cohort's pooled labels even."""


class Selection(Protocol):
    """A component of the selection slot: a frozen dataclass of hyper-parameters.

    Its state is a frozen dataclass of arrays and plain values, or None, so that a run can be checkpointed.
    """

    def init(self, counts: CountsLike) -> Any:
        """Make the state before the first round, from label counts, `(clients, classes)`."""

    def check(self, counts: CountsLike, size: int) -> None:
        """Raise ArgumentError unless cohorts of `size` can be chosen; called before a run, without drawing one.

        A user's own selection may omit this method; mistakes then show when its first cohort is chosen.
        """

    def select(
        self, state: Any, counts: CountsLike, size: int, rng: np.random.Generator, first: int | None = None
    ) -> tuple[IntArray, Any]:
        """Choose the cohort of a round.

        Args:
            state: The state that `init` or the last `select` returned.
            counts: Label counts, shape `(clients, classes)`; the engine passes `LabelCounts`, of which
                `fedskew.labels.as_counts` gives the array.
            first: Id of the client to choose first; None: the selection chooses it.

        Returns:
            Client ids in the order of choice, and the next state. SeolKim may return fewer than `size`, if no other
            client makes the cohort more even.
        """


class Checked:
    """A selection that chooses among checked counts, of so many clients as there are."""

    def init(self, counts: CountsLike) -> Any:
        """Return None: there is no state."""
        as_counts(counts)

    def check(self, counts: CountsLike, size: int) -> None:
        """See `Selection.check`."""
        self._check(len(as_counts(counts)), size)

    def select(
        self, state: Any, counts: CountsLike, size: int, rng: np.random.Generator, first: int | None = None
    ) -> tuple[IntArray, Any]:
        """Choose a cohort; see `Selection.select`."""
        return self._choose(state, self._checked(counts, size, rng, first), size, rng, first)

    def _checked(self, counts: CountsLike, size: int, rng: object, first: int | None) -> FloatArray:
        held = as_counts(counts)
        self._check(len(held), size, first)
        if not isinstance(rng, np.random.Generator):
            raise ArgumentError(f"rng: must be a numpy.random.Generator, not {type(rng).__name__}")
        return held

    def _check(self, clients: int, size: int, first: int | None = None) -> None:
        if not _is_whole_in(size, 1, clients):
            raise ArgumentError(
                f"size: must be a whole number from 1 to {clients}, the number of clients, not {size!r}"
            )
        if first is not None and not _is_whole_in(first, 0, clients - 1):
            raise ArgumentError(f"first: must be a client id from 0 to {clients - 1}, not {first!r}")

    def _choose(
        self, state: Any, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, Any]:
        raise NotImplementedError


def check_cohort(name: str, cohort: object, clients: int) -> IntArray:
    """Convert client ids to an array, `(cohort,)`; raise ArgumentError unless they are distinct and exist."""
    ids = np.asarray(cohort)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ArgumentError(f"{name}: expected client ids, one or more whole numbers, got {cohort!r}")
    if ids.min() < 0 or ids.max() >= clients:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ArgumentError(f"{name}: names client {wrong}, but client ids are 0 to {clients - 1}")
    if len(np.unique(ids)) < len(ids):
        raise ArgumentError(f"{name}: names a client twice, {ids.tolist()}")
    return ids.astype(np.int64)


def check_first(first: int | None, cohort: IntArray) -> None:
    """Raise ArgumentError if `first` is given and the cohort begins with another client."""
    if first is not None and first != cohort[0]:
        raise ArgumentError(f"first: the cohort begins with client {cohort[0]} and can't begin with {first!r}")


def _is_whole_in(value: object, least: int, most: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and least <= int(value) <= most


TIE = 1e-12
"""Smaller differences, of entropies in bits or of numbers of samples, are ties, so that rounding does not decide."""


def even_cohort(
    counts: FloatArray, candidates: IntArray, size: int, first: int | None = None, bits: FloatArray | None = None
) -> IntArray:
    """Choose clients one by one so that their pooled labels are as even as possible: of the highest entropy, or the
    lowest KL divergence to the mix whose logarithms are `bits`, `(classes,)`. Of clients within `TIE` bits of the best,
    the lowest id is chosen. `candidates` are ascending."""
    cohort = np.empty(size, dtype=np.int64)
    pooled = np.zeros(counts.shape[1])
    owners, labels = np.nonzero(counts[candidates])
    held, sizes = counts[candidates[owners], labels], counts[candidates].sum(axis=1)
    aimed = np.zeros(counts.shape[1]) if bits is None else bits
    aims = np.bincount(owners, held * aimed[labels], len(sizes))
    left = np.ones(len(candidates), dtype=bool)
    for turn in range(size):
        if turn or first is None:
            terms, totals = _terms(pooled), sizes + pooled.sum()
            empty = totals == 0
            totals[empty] = 1
            gains = np.bincount(owners, _terms(held + pooled[labels]) - terms[labels], len(sizes))
            near = np.log2(totals) - (gains + terms.sum() - aims - pooled @ aimed) / totals
            entropies = np.where(left, np.where(empty, aimed.min(), near), -np.inf)
            place = int(np.argmax(entropies >= entropies.max() - TIE))
        else:
            place = int(np.searchsorted(candidates, first))
        left[place] = False
        cohort[turn] = candidates[place]
        pooled += counts[cohort[turn]]
    return cohort


def _terms(amounts: FloatArray) -> FloatArray:
    """Compute g(t) = t log2 t, with g(0) = 0."""
    return amounts * np.log2(np.where(amounts > 0, amounts, 1))
