"""Label counts: the record that everything else reads, and the checks of arguments that hold counts, sizes or mixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, placed
from fedskew.labels._csv import Form, Totals, lists_samples, read_counts, read_own, read_shares, write_counts
from fedskew.sheets import Decimal

FloatArray: TypeAlias = NDArray[np.float64]

_NUMBERS_PER_BLOCK = 1 << 16
_ROUNDED = 0.005


class LabelCounts:
    """Label counts: the number of samples of each class at each client.

    Args:
        counts: Shape `(clients, classes)`, numbers >= 0. Fractions are legal, as noisy counts have them, and so is a
            client without samples. Kept as read-only float64, without a copy where the array is float64 already.
        clients: Unique client names; the row numbers where None.
        classes: Unique class names; the column numbers where None.
        sizes: Samples of each client, shape `(clients,)`, where a sample may have several labels, or none; None: as the
            counts sum.
    """

    def __init__(
        self,
        counts: ArrayLike,
        clients: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        sizes: ArrayLike | None = None,
    ) -> None:
        self._counts = as_counts(counts).view()
        self._counts.setflags(write=False)
        self._clients = _names(clients, self._counts.shape[0], "clients")
        self._classes = _names(classes, self._counts.shape[1], "classes")
        self._sizes = None if sizes is None else as_sizes(sizes, self._counts)

    @property
    def counts(self) -> FloatArray:
        """The counts, shape `(clients, classes)`, read-only."""
        return self._counts

    @property
    def clients(self) -> tuple[str, ...]:
        """Client names."""
        if self._clients is None:
            self._clients = tuple(map(str, range(len(self))))
        return self._clients

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        if self._classes is None:
            self._classes = tuple(map(str, range(self._counts.shape[1])))
        return self._classes

    @property
    def sizes(self) -> FloatArray:
        """Samples of each client, shape `(clients,)`."""
        return self._counts.sum(axis=1) if self._sizes is None else self._sizes

    @property
    def several(self) -> bool:
        """Whether a sample may have several labels, or none: clients hold other numbers of samples than of labels."""
        return not np.array_equal(self.sizes, self._counts.sum(axis=1))

    @property
    def marginals(self) -> FloatArray:
        """Each client's label mix, shape `(clients, classes)`: rows sum to 1; the row of an empty client is 0."""
        sums = self._counts.sum(axis=1, keepdims=True)
        mixes: FloatArray = np.divide(self._counts, sums, out=np.zeros_like(self._counts), where=sums > 0)
        return mixes

    @property
    def pooled(self) -> FloatArray:
        """Samples of each class over all clients, shape `(classes,)`."""
        pooled: FloatArray = self._counts.sum(axis=0)
        return pooled

    def take(self, ids: ArrayLike) -> LabelCounts:
        """Return the counts of the clients of these row numbers, in this order; ArgumentError for an unknown one."""
        rows = np.atleast_1d(np.asarray(ids))
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            raise ArgumentError("ids: must be a list of client ids (whole numbers)")
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise ArgumentError(f"ids: there is no client {wrong[0]}; ids go from 0 to {len(self) - 1}")
        names = None
        if self._clients is not None:
            names = [self._clients[row] for row in rows]
        elif len(np.unique(rows)) == len(rows):
            names = [str(row) for row in rows]
        return LabelCounts(self._counts[rows], names, self._classes, None if self._sizes is None else self._sizes[rows])

    @classmethod
    def read_csv(
        cls,
        path: str | Path,
        *,
        client: str | None = None,
        decimal: Decimal | None = None,
        totals: Totals | None = None,
    ) -> LabelCounts:
        """Read a table of counts, wide (a column `client`, and one for each class) or long (client, class, count).

        In the long form a pair that is not listed counts as 0.

        Tables of spreadsheets are read too: columns apart by semicolons or tabs, decimal commas, thousands separators,
        a column of clients with another name ("hospital", or the only one of text). A total (a row or column called so
        that is the sum of the others) is left out. What is left out or looks odd is a DataWarning; what may mean two
        things is an error that asks for one of the arguments below.

        Args:
            totals: "drop" leaves out every row and column that is called a total or a mean, or is the sum of the
                others, "keep" none.
        """
        return cls(*read_counts(Path(path), client, decimal, totals))

    @staticmethod
    def read_own(
        path: str | Path, classes: Sequence[str], *, client: str | None = None, decimal: Decimal | None = None
    ) -> FloatArray:
        """Read one client's counts in the order of `classes`, `(classes,)`; 0 for a class that the file does not name.

        The file is a table as `read_csv` takes it, of which `client` names the row, or has the columns `class` and
        `count`, or one row of counts under a header of class names; whole numbers are class ids where names are words.
        """
        return np.array(read_own(Path(path), classes, client, decimal))

    lists_samples = staticmethod(lists_samples)

    @classmethod
    def of_partitions(cls, partitioner: Any, label: str = "label") -> LabelCounts:
        """Count the labels, in the column `label`, of what a partitioner of the package `flwr-datasets` makes.

        partitioner.dataset = table            # or data.partitioners["train"] of a FederatedDataset that is loaded
        print(describe(LabelCounts.of_partitions(partitioner)))
        """
        where = f"partitioner: {type(partitioner).__name__} gives no labels {label!r}: "
        with placed(where, ArgumentError, of=(AttributeError, KeyError, TypeError, ValueError, IndexError)):
            parts = [partitioner.load_partition(place) for place in range(partitioner.num_partitions)]
            columns = [np.asarray(part[label]) for part in parts]
            known = getattr(getattr(parts[0], "features", {}).get(label), "names", None) if parts else None
        seen = np.unique(np.concatenate(columns)) if columns else np.zeros(0)
        values = seen if known is None else np.arange(len(known))
        counts = [[np.count_nonzero(column == value) for value in values] for column in columns]
        return cls(counts, classes=[str(value) for value in seen] if known is None else list(known))

    def to_csv(self, path: str | Path | TextIO, form: Form = "wide") -> None:
        """Write a file, or to one open for text, from which `read_csv` restores all (with `totals="keep"` in any case).

        `form` is "wide", a row per client, or "long", a row per client and class.
        """
        write_counts(Path(path) if isinstance(path, str) else path, self.counts, self.clients, self.classes, form)

    def __len__(self) -> int:
        return len(self._counts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._counts, dtype=dtype) if copy else np.asarray(self._counts, dtype=dtype)

    def __repr__(self) -> str:
        clients, classes = self._counts.shape
        return f"LabelCounts(clients={clients}, classes={classes}, samples={self.sizes.sum():.10g})"


CountsLike: TypeAlias = ArrayLike | LabelCounts


def as_counts(counts: CountsLike, name: str = "counts") -> FloatArray:
    """Return checked counts as float64, `(clients, classes)`, without a copy where possible; ArgumentError if wrong."""
    if isinstance(counts, LabelCounts):
        return counts.counts
    return as_amounts(counts, name, ("clients", "classes"))


def as_one_or_all(counts: CountsLike) -> FloatArray:
    """Return checked counts as `as_counts` does; those of one client, `(classes,)`, stay of that shape."""
    array = as_floats(counts, "counts")
    return as_amounts(array, "counts", ("classes",) if array.ndim == 1 else ("clients", "classes"))


def as_target(target: ArrayLike, classes: int, name: str = "target", written: bool = False) -> FloatArray:
    """Return a checked label mix, `(classes,)`, as float64 of sum 1; one `written` sums to 1 or 100, or counts."""
    array = as_amounts(target, name, (classes,), "one share for each class")
    total = float(array.sum())
    if not 0 < total < np.inf:
        raise ArgumentError(f"{name}: its shares must have a positive sum, not {total}")
    if written and (array % 1).any() and min(abs(total - 1), abs(total / 100 - 1)) > _ROUNDED:
        raise ArgumentError(
            f"{name}: the shares sum to {total:.6g}; give shares that sum to 1, percentages that sum to 100, or counts"
        )
    return array / total


def read_target(path: str | Path, classes: Sequence[str], decimal: Decimal | None = None) -> FloatArray:
    """Read a target label mix from a file, comma-separated or as spreadsheets write them (see `LabelCounts.read_csv`).

    The file has the columns `class` and `share`, one row per class, or one row of shares under a header of class names.
    Shares sum to 1; percentages, which sum to 100, and counts are divided by their sum.

    Args:
        classes: Class names; the file's classes are matched to them by name.
        decimal: The decimal sign of its numbers; None: as the file shows.

    Returns:
        The mix in the order of `classes`, shape `(classes,)`, sum 1.
    """
    return as_target(read_shares(Path(path), classes, decimal), len(classes), str(path), written=True)


def as_sizes(sizes: ArrayLike | None, counts: FloatArray) -> FloatArray:
    """Return checked client sizes, `(clients,)`, as float64; the row sums of `counts` where None."""
    if sizes is None:
        summed: FloatArray = counts.sum(axis=1)
        return summed
    return as_amounts(sizes, "sizes", (len(counts),), "one number for each client")


def as_floats(values: ArrayLike | LabelCounts, name: str) -> FloatArray:
    """Values as a float64 array, without a copy where they are one already."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: must be an array of numbers, every row of the same length") from None


def as_amounts(values: ArrayLike, name: str, shape: tuple[int | str, ...], what: str = "") -> FloatArray:
    """Return numbers that are finite and >= 0, as float64 of a shape, in which a word stands for any size above 0."""
    array = as_floats(values, name)
    if array.ndim != len(shape) or any(
        not size if isinstance(wanted, str) else size != wanted for wanted, size in zip(shape, array.shape, strict=True)
    ):
        expected = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ArgumentError(f"{name}: must have the shape {expected}{what and f', {what}'}, not {array.shape}")
    if array.size == 0 or (array.min() >= 0 and array.max() < np.inf):  # which needs no array of the same size
        return array
    where = np.unravel_index(np.argmin((array >= 0) & (array < np.inf)), array.shape)
    place = ", ".join(str(int(index)) for index in where)
    raise ArgumentError(f"{name}: every number must be finite and not negative, but {name}[{place}] is {array[where]}")


def row_blocks(array: FloatArray) -> Iterator[slice]:
    """Slices of a few rows each, so that intermediate results fit into the cache."""
    rows = max(1, _NUMBERS_PER_BLOCK // array.shape[1])
    return (slice(start, start + rows) for start in range(0, len(array), rows))


def _names(names: Iterable[str] | None, size: int, argument: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    listed = tuple(map(str, names))
    if len(listed) != size:
        raise ArgumentError(f"{argument}: expected a name for each of {size}, got {len(listed)}")
    if len(set(listed)) < size:
        twice = next(name for name, times in Counter(listed).items() if times > 1)
        raise ArgumentError(f"{argument}: the name {twice!r} occurs twice")
    return listed
