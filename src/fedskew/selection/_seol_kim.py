"""SeolKim: Seol & Kim, "Performance Enhancement in Federated Learning by Reducing Class Imbalance of Non-IID Data",
Sensors 23(3):1152, 2023, Algorithm 2. FedEntOpt's paper calls it "KL".

The largest client comes first, with all its data; m is the size of its largest class. Then clients are scanned in the
order of falling size. Let v be the label counts in use so far, f the class that v has least of, and n_c the number of
samples of class c that a client holds. A client without samples of f is skipped; any other joins with a quota of
min(m - v_c, n_c) samples of each class c. Scans repeat until `size` clients are chosen, the KL divergence of v to
uniform, in bits, falls below the threshold, or a scan adds no client.

Clients train on their quota, and are weighted by it. The cohort is the same in every round. The paper's listing updates
v before it computes the quota, which would then be 0; here the quota is computed first. No client is chosen twice or
with an empty quota. The paper gives no threshold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedskew.components import Cost
from fedskew.errors import ArgumentError
from fedskew.labels import CountsLike, as_counts, kl_to_uniform
from fedskew.parameters import FloatArray, IntArray, NonNegative, component
from fedskew.selection._protocol import EVEN_LABELS, TIE, Checked


@dataclass(frozen=True)
class SeolKimState:
    """How many samples of each class each client of the last cohort trains on, `(cohort, classes)`."""

    quotas: FloatArray


@component
class SeolKim(Checked):
    """Adds clients that hold the class which the cohort has least of, each with a quota of samples of each class.

    Attributes:
        threshold: KL divergence of the cohort's labels to uniform, in bits, below which no further client is added.
    """

    paper: ClassVar[str] = "Seol & Kim, Sensors 2023"
    cost: ClassVar[Cost] = Cost(numbers=("C down",))
    needs_label_counts: ClassVar[bool] = True
    fixed_cohort: ClassVar[bool] = True
    assigns_quotas: ClassVar[bool] = True
    warns: ClassVar[Mapping[str, str]] = EVEN_LABELS

    threshold: NonNegative = 0.01

    def init(self, counts: CountsLike) -> SeolKimState:
        """Return a state without quotas."""
        return SeolKimState(np.zeros((0, as_counts(counts).shape[1])))

    def check(self, counts: CountsLike, size: int) -> None:
        """See `Selection.check`."""
        super().check(counts, size)
        if not as_counts(counts).any():
            raise ArgumentError("counts: no client holds a sample")

    def _choose(
        self, state: SeolKimState, counts: FloatArray, size: int, rng: np.random.Generator, first: int | None
    ) -> tuple[IntArray, SeolKimState]:
        """Choose at most `size` clients; the next state has their quotas."""
        order = np.argsort(-counts.sum(axis=1), kind="stable")
        cohort = [int(order[0]) if first is None else int(first)]
        quotas = [counts[cohort[0]]]
        if not quotas[0].any():
            raise ArgumentError(f"counts: client {cohort[0]}, the first of the cohort, holds no sample")
        used, most, scanned = quotas[0], quotas[0].max(), 0
        while not self._is_done(cohort, size, used) and scanned < len(cohort):  # until a scan adds no client
            scanned, rarest = len(cohort), _rarest(used)
            for client in np.setdiff1d(order, cohort, assume_unique=True):  # in this order
                filled = np.minimum(used + counts[client], most) if counts[client, rarest] > 0 else used
                if (filled > used).any():
                    cohort.append(int(client))
                    quotas.append(filled - used)
                    used, rarest = filled, _rarest(filled)
                    if self._is_done(cohort, size, used):
                        break
        return np.array(cohort, dtype=np.int64), SeolKimState(np.stack(quotas))

    def _is_done(self, cohort: list[int], size: int, used: FloatArray) -> bool:
        return len(cohort) == size or float(kl_to_uniform(used)) < self.threshold


def _rarest(used: FloatArray) -> int:
    return int(np.argmax(used <= used.min() + TIE))
