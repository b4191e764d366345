"""Measures of how unevenly labels are distributed."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.labels._counts import CountsLike, FloatArray, as_amounts, as_counts, as_one_or_all, as_target, row_blocks
from fedskew.mixing import Programme


def entropy(counts: CountsLike) -> float | FloatArray:
    """Shannon entropy of label counts in bits, `-sum p log2 p` with 0 log 0 = 0 (FedEntOpt, section III)."""
    array = as_one_or_all(counts)
    rows = np.atleast_2d(array)
    bits = np.concatenate([_entropies(rows[part]) for part in row_blocks(rows)])
    return bits if array.ndim == 2 else float(bits[0])


def _entropies(rows: FloatArray) -> FloatArray:
    sizes = rows.sum(axis=1, keepdims=True)
    shares = np.divide(rows, sizes, out=np.zeros_like(rows), where=sizes > 0)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    logs *= shares
    bits: FloatArray = np.maximum(-logs.sum(axis=1), 0.0)
    return bits


def kl_to_uniform(counts: CountsLike) -> float | FloatArray:
    """Kullback-Leibler divergence of label counts from the uniform mix in bits, `log2(classes) - entropy`."""
    array = as_one_or_all(counts)
    divergence = np.maximum(np.log2(array.shape[-1]) - entropy(array), 0.0)
    return float(divergence) if array.ndim == 1 else divergence


def effective_sample_size(weights: ArrayLike, sizes: ArrayLike) -> float:
    """Effective sample size of weighted clients, `1 / sum(weights**2 / sizes)` (FedPALS, section 3.1).

    It is at most the number of samples, which FedAvg's weights reach.
    """
    weighed = as_amounts(weights, "weights", ("clients",))
    held = as_amounts(sizes, "sizes", weighed.shape, "that of the weights")
    present = held > 0
    spread = float(np.sum(weighed[present] ** 2 / held[present]))
    return 1 / spread if spread > 0 else 0.0


def projection_distance(counts: CountsLike, target: ArrayLike) -> float:
    """Squared distance from a target label mix to the nearest mix that weighted clients can have.

    `min ||T - sum_i a_i S_i||^2` over weights a >= 0 of sum 1, with S_i the clients' label marginals (FedPALS's
    d(T, S)); exact up to rounding.
    """
    held = as_counts(counts)
    residual = Programme(held, as_target(target, held.shape[1])).projection.residual
    return float(residual @ residual)


GROUPS = ("vacant", "minority", "majority")
"""Names of the group numbers of `class_group_matrix`."""


def class_group_matrix(counts: CountsLike) -> NDArray[np.int8]:
    """Return the group of each class at each client: 0 vacant, 1 minority, 2 majority (FedVLS, FedLMD).

    A class is vacant at a client without samples of it, a majority class with more than the client's samples / classes,
    and a minority class otherwise. At an empty client every class is vacant.
    """
    held = as_counts(counts)
    groups = np.empty(held.shape, dtype=np.int8)
    for part in row_blocks(held):
        rows = held[part]
        groups[part] = rows > 0
        groups[part] += rows * rows.shape[1] > rows.sum(axis=1, keepdims=True)
    return groups


def colocation(counts: CountsLike) -> FloatArray:
    """Return how many samples of each two classes clients hold together, `(classes, classes)`: sum_i min(n_ia, n_ib).

    The diagonal is the class totals.
    """
    held = as_counts(counts)
    classes = held.shape[1]
    together = np.zeros((classes, classes))
    for part in row_blocks(held):
        columns = np.ascontiguousarray(held[part].T)
        for label, own in enumerate(columns):
            holders = np.flatnonzero(own)
            others = columns[label:] if len(holders) == len(own) else columns[label:, holders]
            together[label, label:] += np.minimum(own[holders], others).sum(axis=1)
    return np.maximum(together, together.T)


@dataclass(frozen=True)
class ClassPairs:
    """Which pairs of classes some client can tell apart by its own samples.

    A loss that compares only the classes of one client (FedVLS's calibration, FedLC) learns to tell two classes apart
    from clients that hold both, and from as many samples as the rarer of the two has there.

    Attributes:
        together: Their co-location, shape `(classes, classes)`; see `colocation`.
        few: Co-location below which a pair counts as hardly learnt by such a loss.
        hardly: Co-location below which it counts as not learnt.
    """

    together: FloatArray

    few: ClassVar[int] = 100
    hardly: ClassVar[int] = 10

    @classmethod
    def of(cls, counts: CountsLike) -> "ClassPairs":
        """Return the pairs of a federation's classes."""
        return cls(colocation(counts))

    @property
    def number(self) -> int:
        """Number of pairs of classes that both have a sample somewhere."""
        occur = int(np.count_nonzero(np.diagonal(self.together)))
        return occur * (occur - 1) // 2

    def under(self, samples: float) -> NDArray[np.int64]:
        """Return the pairs of classes that occur and have fewer samples together, `(pairs, 2)`, the fewest first."""
        occurs = np.diagonal(self.together) > 0
        one, other = np.nonzero(np.triu(np.outer(occurs, occurs) & (self.together < samples), 1))
        return np.stack([one, other], axis=1)[np.argsort(self.together[one, other], kind="stable")]

    def in_words(self, class_names: tuple[str, ...]) -> str:
        """Return how many pairs are below both limits, with the first few; empty if none is below the lower one."""
        hardly, few = self.under(self.hardly), self.under(self.few)
        if not len(hardly):
            return ""
        named = [f"{class_names[one]} and {class_names[other]}" for one, other in hardly[:3]]
        rest = f" and {len(hardly) - len(named):,} more" if len(hardly) > len(named) else ""
        return (
            f"{len(hardly):,} of {self.number:,} pairs of classes have under {self.hardly} samples together (the "
            f"smaller of a client's two counts, summed over clients), {len(few):,} under {self.few}: "
            f"{'; '.join(named)}{rest}"
        )
