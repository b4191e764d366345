"""What a selection implements."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedskew.labels import CountsLike

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Selection(Protocol):
    """One component of the selection slot: a frozen dataclass of hyper-parameters.

    A state is a frozen dataclass of arrays and plain values (or None), so that a run can be checkpointed.
    """

    def init(self, counts: CountsLike) -> Any:
        """The state before the first round; `counts`: `(clients, classes)`."""

    def check(self, counts: CountsLike, size: int) -> None:
        """Raise ArgumentError unless cohorts of `size` can be chosen, without choosing one; asked before a run.

        A selection of one's own may leave it out: its first cohort is chosen before anybody trains.
        """

    def select(
        self, state: Any, counts: CountsLike, size: int, rng: np.random.Generator, first: int | None = None
    ) -> tuple[IntArray, Any]:
        """`size` client ids in order of choice, and the next state. `first` fixes the first choice.

        The engine passes `LabelCounts`, whose values have been checked; `fedskew.labels.as_counts` gives the array. A
        selection may return fewer where no other client would help (SeolKim).
        """
