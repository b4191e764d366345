"""Rules that give every client a fixed number of labels: `Quantity` and `Sparsity`."""

from __future__ import annotations

import numpy as np

from fedskew.errors import PartitionError
from fedskew.parameters import Count, Switch, component
from fedskew.partition._rule import IntArray, Rule, check_labels_per_client, holding
from fedskew.tables import counted


@component
class Quantity(Rule):
    """A fixed number of labels for each client; every class is shared evenly by the clients that hold it.

    The `#C = k` of NIID-Bench and FedEntOpt. Client i gets label i mod C and k - 1 distinct others at random; the
    samples of a class are divided evenly among its holders; where a remainder is left, the first of them get one sample
    more.

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
                f"class {scarce} has {class_sizes[scarce]} samples for {holders[scarce]} holders: lower clients or "
                "labels_per_client"
            )
        counts: IntArray = holds * quota.min()
        return counts
