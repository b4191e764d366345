"""Which labels each client holds: the record that everything else reads, and the checks of what is passed as counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError

FloatArray: TypeAlias = NDArray[np.float64]

_NUMBERS = 1 << 16


class LabelCounts:
    """How many samples of each class every client holds.

    `counts`: `(clients, classes)`, numbers >= 0 (fractions are legal: noisy counts have them); kept as read-only
    float64, without a copy where it is float64 already. `clients` and `classes`: names, unique; without them the row
    and column numbers. An empty client is legal. Raises ArgumentError for a wrong shape, NaN, a negative count, no
    client, no class, or names that don't fit.
    """

    def __init__(
        self, counts: ArrayLike, clients: Sequence[str] | None = None, classes: Sequence[str] | None = None
    ) -> None:
        self._counts = as_counts(counts).view()
        self._counts.setflags(write=False)
        self._clients = _names(clients, self._counts.shape[0], "clients")
        self._classes = _names(classes, self._counts.shape[1], "classes")

    @property
    def counts(self) -> FloatArray:
        """`(clients, classes)`, read-only."""
        return self._counts

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""
        if self._clients is None:
            self._clients = tuple(map(str, range(len(self))))
        return self._clients

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names."""
        if self._classes is None:
            self._classes = tuple(map(str, range(self._counts.shape[1])))
        return self._classes

    @property
    def sizes(self) -> FloatArray:
        """Samples of each client, `(clients,)`."""
        sizes: FloatArray = self._counts.sum(axis=1)
        return sizes

    @property
    def marginals(self) -> FloatArray:
        """Each client's label mix, `(clients, classes)`: rows sum to 1; the row of an empty client is 0."""
        sizes = self.sizes[:, None]
        return np.divide(self._counts, sizes, out=np.zeros_like(self._counts), where=sizes > 0)

    @property
    def pooled(self) -> FloatArray:
        """Samples of each class over all clients, `(classes,)`."""
        pooled: FloatArray = self._counts.sum(axis=0)
        return pooled

    def take(self, ids: ArrayLike) -> LabelCounts:
        """The counts of these clients (row numbers), in this order. Raises ArgumentError for an unknown id."""
        rows = np.atleast_1d(np.asarray(ids))
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            raise ArgumentError("ids: must be a list of client numbers (whole numbers)")
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise ArgumentError(f"ids: there is no client {wrong[0]}; ids go from 0 to {len(self) - 1}")
        names = None
        if self._clients is not None:
            names = [self._clients[row] for row in rows]
        elif len(np.unique(rows)) == len(rows):
            names = [str(row) for row in rows]
        return LabelCounts(self._counts[rows], names, self._classes)

    @classmethod
    def read_csv(cls, path: str | Path) -> LabelCounts:
        """Read a comma-separated file in either form, told apart by its header.

        Wide: a column `client` and one column for each class, one row a client. Long: the columns `client`, `class` and
        `count`; a pair that is not listed is 0; classes stand in the order in which they first appear, or by number
        where all of them are whole numbers. Raises ArgumentError naming file, line and column of what is wrong.
        """
        from fedskew.labels._csv import read_counts

        return read_counts(Path(path))

    def to_csv(self, path: str | Path, form: Literal["wide", "long"] = "wide") -> None:
        """Write a file that `read_csv` reads back to the same numbers and names."""
        from fedskew.labels._csv import write_counts

        write_counts(self, Path(path), form)

    def __len__(self) -> int:
        return len(self._counts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._counts, dtype=dtype) if copy else np.asarray(self._counts, dtype=dtype)

    def __repr__(self) -> str:
        clients, classes = self._counts.shape
        return f"LabelCounts(clients={clients}, classes={classes}, samples={self._counts.sum():.10g})"


CountsLike: TypeAlias = ArrayLike | LabelCounts


def as_counts(counts: CountsLike, name: str = "counts") -> FloatArray:
    """`counts` as float64 `(clients, classes)`, checked; what every function that takes counts calls first.

    Raises ArgumentError, naming the argument, for a wrong shape, no client or no class, NaN, infinity, or a negative
    count.
    """
    if isinstance(counts, LabelCounts):
        return counts.counts
    array = as_floats(counts, name)
    if array.ndim != 2:
        raise ArgumentError(f"{name}: must have the shape (clients, classes), not {array.shape}")
    if not array.shape[0]:
        raise ArgumentError(f"{name}: there is no client")
    if not array.shape[1]:
        raise ArgumentError(f"{name}: there is no class")
    check_amounts(array, name)
    return array


def as_target(target: ArrayLike, classes: int, name: str = "target") -> FloatArray:
    """A label mix, `(classes,)`: non-negative, scaled to sum 1. Raises ArgumentError where it can't be one."""
    array = as_floats(target, name)
    if array.shape != (classes,):
        raise ArgumentError(f"{name}: must have the shape ({classes},), one share for each class, not {array.shape}")
    check_amounts(array, name)
    total = array.sum()
    if not 0 < total < np.inf:
        raise ArgumentError(f"{name}: its shares must have a positive sum, not {total}")
    mix: FloatArray = array / total
    return mix


def as_sizes(sizes: ArrayLike | None, counts: FloatArray, name: str = "sizes") -> FloatArray:
    """Samples of each client, `(clients,)`; the row sums of the counts where `sizes` is None. Raises ArgumentError."""
    if sizes is None:
        summed: FloatArray = counts.sum(axis=1)
        return summed
    array = as_floats(sizes, name)
    if array.shape != (len(counts),):
        raise ArgumentError(
            f"{name}: must have the shape ({len(counts)},), one number for each client, not {array.shape}"
        )
    check_amounts(array, name)
    return array


def as_floats(values: ArrayLike | LabelCounts, name: str) -> FloatArray:
    """`values` as a float64 array, without a copy where it is one. Raises ArgumentError where it can't be."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: must be an array of numbers, every row of the same length") from None


def check_amounts(array: FloatArray, name: str) -> None:
    """Raise ArgumentError unless all numbers are finite and >= 0; min and max need no memory of the array's size."""
    if array.size == 0 or (array.min() >= 0 and array.max() < np.inf):
        return
    where = np.unravel_index(np.argmin((array >= 0) & (array < np.inf)), array.shape)
    place = ", ".join(str(int(index)) for index in where)
    raise ArgumentError(f"{name}: every number must be finite and not negative, but {name}[{place}] is {array[where]}")


def row_blocks(array: FloatArray) -> Iterator[slice]:
    """Rows a few at a time, so that what is computed of them stays in the cache and needs no memory of the whole."""
    rows = max(1, _NUMBERS // array.shape[1])
    return (slice(start, start + rows) for start in range(0, len(array), rows))


def _names(names: Iterable[str] | None, size: int, argument: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    listed = tuple(map(str, names))
    if len(listed) != size:
        raise ArgumentError(f"{argument}: {len(listed)} names for {size} {argument}")
    if len(set(listed)) < size:
        twice = next(name for name, times in Counter(listed).items() if times > 1)
        raise ArgumentError(f"{argument}: the name {twice!r} stands twice")
    return listed
