"""Rules by which a client holds a few labels: by their number, in equal shards of classes, or in pairs of clients."""

import numpy as np

from fedskew.errors import ArgumentError, PartitionError
from fedskew.parameters import Count, Finite, IntArray, Switch, component
from fedskew.partition._rule import Rule, check_labels_per_client, holding
from fedskew.tables import counted


@component
class Quantity(Rule):
    """A fixed number of labels for each client; every class is shared evenly by the clients that hold it.

    The `#C = k` of NIID-Bench and FedEntOpt. Client i gets label i mod C and k - 1 distinct others at random; the
    samples of a class are divided evenly among its holders; of a remainder the first of them get one more each.

    Attributes:
        labels_per_client: Labels of each client, k.
    """

    labels_per_client: Count

    def _counts(self, class_sizes: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        classes = len(class_sizes)
        check_labels_per_client(self.labels_per_client, classes)
        if clients < classes and self.labels_per_client < classes:
            raise PartitionError(
                f"{counted(clients, 'client leaves', 'clients leave')} some of {classes} classes without a holder: "
                f"take at least {classes} clients, or labels_per_client = {classes}"
            )
        # A random order of the classes for each client, its own label first.
        order = rng.random((clients, classes))
        order[np.arange(clients), np.arange(clients) % classes] = -1.0
        held = np.argpartition(order, self.labels_per_client - 1, axis=1)[:, : self.labels_per_client]
        holds = holding(held, classes)

        part, rest = np.divmod(class_sizes, holds.sum(axis=0))
        place = np.cumsum(holds, axis=0)  # of each holder among the holders of its class, from 1
        counts: IntArray = holds * (part + (place <= rest))
        return counts


@component
class Sparsity(Rule):
    """A few random labels for each client, in equal numbers; the last client is the target.

    The `C = k` split of FedPALS. Each client draws k distinct labels. Every client gets the same number of samples of
    each of its labels, and no sample goes to two clients. The paper gives no number; here it is the largest possible:
    the minimum over the labels in use of floor(samples of the label / holders of the label).

    So drawn, the target may have a label that no client that trains holds (10 clients with 3 of 10 labels each: one
    target in nine), and then no method can serve it.

    Attributes:
        labels_per_client: Labels of each client, k.
        covered: Whether the target's labels are drawn again until each has a client that holds it; the paper doesn't.
    """

    target_client = True

    labels_per_client: Count
    covered: Switch = False

    def _counts(self, class_sizes: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        classes = len(class_sizes)
        if clients < 2:
            raise PartitionError("the last client is the target, so one client leaves none to train: take 2 or more")
        check_labels_per_client(self.labels_per_client, classes)
        held = np.argsort(rng.random((clients, classes)), axis=1)[:, : self.labels_per_client]
        trained = np.unique(held[:-1])
        if self.covered and not np.isin(held[-1], trained).all():
            held[-1] = rng.permutation(trained)[: self.labels_per_client]  # as if drawn again until it is covered
        holds = holding(held, classes)
        holders = holds.sum(axis=0)
        used = np.flatnonzero(holders)
        quota = class_sizes[used] // holders[used]
        scarce = used[np.argmin(quota)]
        if quota.min() == 0:
            raise PartitionError(
                f"class {scarce} has {counted(int(class_sizes[scarce]), 'sample')} for "
                f"{counted(int(holders[scarce]), 'holder')}: lower clients or labels_per_client"
            )
        counts: IntArray = holds * quota.min()
        return counts


@component
class Shards(Rule):
    """Every class is cut into equal shards, and every client is dealt the same number of them.

    The sharding of FedNTD (Lee et al., 2022). With K clients, C classes and s shards per client, each class is cut into
    s * K / C shards, which must be a whole number; all shards are shuffled and dealt. Shards of a class differ by at
    most one sample. A client may be dealt one label twice, so it holds at most s labels.

    Attributes:
        per_client: Shards of each client, s.
    """

    per_client: Count

    def _counts(self, class_sizes: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        classes = len(class_sizes)
        per_class, rest = divmod(self.per_client * clients, classes)
        if rest or not per_class:
            raise PartitionError(
                f"{classes} classes can't share {self.per_client} x {clients} shards equally: choose per_client or "
                f"clients so that their product is a multiple of {classes}"
            )
        part, rest_of_class = np.divmod(class_sizes, per_class)
        shard_sizes = part[:, None] + (np.arange(per_class) < rest_of_class[:, None])
        shards = rng.permutation(classes * per_class).reshape(clients, self.per_client)
        counts = np.zeros((clients, classes), dtype=np.int64)
        np.add.at(counts, (np.arange(clients)[:, None], shards // per_class), shard_sizes.ravel()[shards])
        return counts


@component
class PairedShards(Rule):
    """Pairs, or larger groups, of clients that share the same classes exclusively and in unequal parts.

    The "s" partition of FedVLS, read in its authors' code (the paper cites FedNTD, whose rule is another: `Shards`).
    With K clients, C classes and s classes per client, a class goes to the first floor(K s / C) clients that may still
    take one. With two such holders, as in all of the paper's image tasks, clients 2p and 2p + 1 share the same s
    classes; AG News with 10 clients and s = 2 has groups of five. Of a class with n samples and h holders, each
    holder but the last gets a whole number of samples, drawn uniformly from [low * 2n/h, high * 2n/h), and the last
    gets the rest. The authors take low 1/20, high 1/2 (from a tenth of the equal part to the equal part), but high 1
    for CIFAR-10.

    Attributes:
        classes_per_client: Classes of each client, s.
        low: Smallest share of a class that the first client of a pair gets; in larger groups, of two equal parts.
        high: Largest such share.
    """

    classes_per_client: Count
    low: Finite = 1 / 20
    high: Finite = 1 / 2

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ArgumentError(f"low, high: must satisfy 0 <= low < high <= 1, not {self.low!r} and {self.high!r}")

    def _counts(self, class_sizes: IntArray, clients: int, rng: np.random.Generator) -> IntArray:
        classes = len(class_sizes)
        held = self._held(clients, classes)
        holders = held.sum(axis=0)
        if (self.high * 2 * (holders - 1) > holders).any():
            raise PartitionError(
                f"{holders.max()} clients share a class, and all but the last may ask for more than there is: lower "
                f"high to {holders.max() / (2 * (holders.max() - 1)):.3g} or less, or take another number of clients"
            )
        # Every holder of a class but its last, class after class.
        last = held.shape[0] - 1 - held[::-1].argmax(axis=0)
        of_class, client = np.nonzero((held & (np.arange(clients)[:, None] != last)).T)
        part = class_sizes[of_class] * 2 / holders[of_class]
        least = np.floor(self.low * part + 1e-9).astype(np.int64)
        end = np.floor(self.high * part + 1e-9).astype(np.int64)
        counts = np.zeros((clients, classes), dtype=np.int64)
        # Where the class is too small for the interval to hold a whole number, its lower end.
        counts[client, of_class] = rng.integers(least, np.maximum(end, least + 1))
        counts[last, np.arange(classes)] = class_sizes - counts.sum(axis=0)
        return counts

    def _held(self, clients: int, classes: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Return which client holds which class, `(clients, classes)`."""
        group = self.classes_per_client * clients // classes
        held = np.zeros((clients, classes), dtype=np.bool_)
        for label in range(classes):
            free = np.flatnonzero(held.sum(axis=1) < self.classes_per_client)[:group]
            held[free, label] = True
        busy, taken = int(held.any(axis=1).sum()), int(held.any(axis=0).sum())
        if busy < clients or taken < classes:
            groups = -(-classes // self.classes_per_client)
            raise PartitionError(
                f"{counted(clients, 'client')} with {self.classes_per_client} of {classes} classes each leave over "
                f"{counted(clients - busy, 'client')} and {counted(classes - taken, 'class', 'classes')}: take "
                f"{2 * groups} clients in pairs, or another classes_per_client"
            )
        return held
