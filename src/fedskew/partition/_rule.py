"""What the partition rules share: the base class, checks of arguments, and dealing out samples by counts."""

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedskew.errors import ArgumentError, PartitionError
from fedskew.parameters import BelowOne, Count, IntArray, checked


class Rule:
    """A way to divide a labelled data set among clients, a frozen dataclass of parameters, which decides how many
    samples of each class every client gets; which ones is drawn uniformly."""

    target_client = False  # whether the last client is the target: the others train for its label mix

    def split(self, labels: ArrayLike, clients: int, rng: Generator, num_classes: int | None = None) -> list[IntArray]:
        """Divide samples among clients; the result depends on the arguments and the state of `rng` only.

        Args:
            labels: Class ids, shape `(samples,)`, integers.
            clients: Number of clients, with the target client where the rule has one.
            num_classes: Number of classes; the largest label + 1 where None.

        Returns:
            For each client an ascending array of indices into `labels`. No sample goes to two clients; some rules leave
            samples out.

        Raises:
            PartitionError: The rule can't divide these labels among this many clients; the message says what to change.
        """
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        return deal(labels, self._counts(class_sizes, clients, rng), rng)

    def _counts(self, class_sizes: IntArray, clients: int, rng: Generator) -> IntArray:
        """Return the samples of each client and class, `(clients, classes)`, of so many samples of each class."""
        raise NotImplementedError


@checked
def check_samples(
    labels: ArrayLike, clients: Count, rng: Generator, num_classes: Count | None
) -> tuple[IntArray, IntArray]:
    """Check the arguments of `Rule.split`; returns the labels as int64 and the samples of each class, `(classes,)`."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ArgumentError(f"labels: must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        raise ArgumentError("labels: there is no sample to divide")
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"labels: must be integers, not {array.dtype}")
    array = array.astype(np.int64)
    if array.min() < 0:
        raise ArgumentError(f"labels: must be class ids from 0, but {array.min()} occurs")
    if num_classes is not None and array.max() >= num_classes:
        raise ArgumentError(f"labels: class id {array.max()} occurs, but num_classes is {num_classes}")
    if not isinstance(rng, Generator):
        raise ArgumentError(f"rng: must be a numpy.random.Generator, not {type(rng).__name__}")
    return array, np.bincount(array, minlength=num_classes or 0)


def check_labels_per_client(labels: int, classes: int) -> None:
    """Refuse more labels a client than there are."""
    if labels > classes:
        raise PartitionError(f"a client can't hold {labels} of {classes} classes: lower labels_per_client")


def deal(labels: IntArray, counts: IntArray, rng: Generator) -> list[IntArray]:
    """Draw `counts`, `(clients, classes)`, samples of each class of `labels` for each client, uniformly and without
    replacement; return an ascending index array a client."""
    clients, classes = counts.shape
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    undealt = np.bincount(labels, minlength=classes) - counts.sum(axis=0)
    # An extra row holds the samples that no client gets. Class by class, each client id is repeated once per sample.
    table = np.vstack([counts, undealt])
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(clients + 1), classes), table.T.ravel())
    by_owner = np.argsort(owner, kind="stable")
    return np.split(by_owner, np.cumsum(table.sum(axis=1))[:-1])[:clients]


def apportion(totals: IntArray, shares: NDArray[np.float64] | IntArray) -> IntArray:
    """Divide each row's total, `(rows,)`, by its shares, `(rows, columns)`, by largest remainder; equal remainders go
    to the lowest column. No entry is further than 1 from its exact quota."""
    quotas = totals[:, None] * (shares / shares.sum(axis=1, keepdims=True))
    counts: IntArray = np.floor(quotas).astype(np.int64)
    order = np.argsort(counts - quotas, axis=1, kind="stable")
    one_more = np.arange(shares.shape[1]) < (totals - counts.sum(axis=1))[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + one_more, axis=1)
    return counts


def holding(held: IntArray, classes: int) -> IntArray:
    """Return 1 where a client holds a class, else 0, `(clients, classes)`; `held` has each client's classes."""
    holds = np.zeros((len(held), classes), dtype=np.int64)
    np.put_along_axis(holds, held, 1, axis=1)
    return holds


def stratified(labels: ArrayLike, size: int, rng: Generator) -> IntArray:
    """Draw some of the samples, each class by its share of all.

    Returns an ascending array of indices into `labels`; no class has more than its share rounded up, nor less than
    rounded down. ArgumentError is raised where there are not so many samples.
    """
    array, class_sizes = check_samples(labels, 1, rng, None)
    if not 1 <= size <= len(array):
        raise ArgumentError(f"rows: must be from 1 to the number of samples, {len(array)}, not {size}")
    return deal(array, apportion(np.array([size]), class_sizes[None]), rng)[0]


@checked
def hold_out(
    rows: IntArray, labels: ArrayLike, share: BelowOne, rng: Generator, every_class: bool = False
) -> tuple[IntArray, IntArray]:
    """Divide a client's samples into those that it trains on and those that are held out, both ascending.

    Every sample is held out with the same probability, and of every class the share, rounded up or down at random: so
    that over many clients a class of which each has few samples is held out as often as any. One sample at least stays.

    Args:
        rows: The client's samples, as indices into `labels`.
        labels: Class ids of the whole data set, shape `(samples,)`.
        share: Share to hold out, from 0 to below 1; else ArgumentError is raised.
        every_class: Whether one sample at least of each class stays.
    """
    mixed = rng.permutation(np.asarray(rows, dtype=np.int64))
    by_class = mixed[np.argsort(np.asarray(labels)[mixed], kind="stable")]
    passed = np.floor(share * np.arange(len(by_class) + 1) + rng.random())  # systematic sampling, from a random start
    taken = np.diff(passed) > 0
    if every_class:
        _, first, sizes = np.unique(np.asarray(labels)[by_class], return_index=True, return_counts=True)
        whole = np.add.reduceat(taken.astype(np.int64), first) == sizes
        taken[first[whole]] = False
    elif taken.all():
        taken[-1:] = False
    return np.sort(by_class[~taken]), np.sort(by_class[taken])
