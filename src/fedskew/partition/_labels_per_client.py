"""Rules that give every client a fixed number of labels: `Quantity` and `Sparsity`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedskew.errors import PartitionError
from fedskew.parameters import Count, Switch, component
from fedskew.partition._rule import IntArray, check_samples, deal
from fedskew.tables import counted


@component
class Quantity:
    """A fixed number of labels for each client; every class is shared evenly by the clients that hold it.

    The `#C = k` of NIID-Bench and FedEntOpt. Client i gets label i mod C and k - 1 distinct others at random; the
    samples of a class are divided evenly among its holders; where a remainder is left, the first of them get one sample
    more.

    Attributes:
        labels_per_client: Labels of each client, k.
    """

    target_client: ClassVar[bool] = False

    labels_per_client: Count

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide all samples; see `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        if self.labels_per_client > classes:
            raise PartitionError(
                f"a client can't hold {self.labels_per_client} of {classes} classes: lower labels_per_client"
            )
        if clients < classes and self.labels_per_client < classes:
            raise PartitionError(
                f"{counted(clients, 'client leaves', 'clients leave')} some of {classes} classes without a holder: "
                f"take at least {classes} clients, or labels_per_client = {classes}"
            )
        # A random order of the classes for each client, its own label first.
        order = rng.random((clients, classes))
        order[np.arange(clients), np.arange(clients) % classes] = -1.0
        held = np.argpartition(order, self.labels_per_client - 1, axis=1)[:, : self.labels_per_client]
        holds = np.zeros((clients, classes), dtype=np.int64)
        np.put_along_axis(holds, held, 1, axis=1)

        part, rest = np.divmod(class_sizes, holds.sum(axis=0))
        place = np.cumsum(holds, axis=0)  # of each holder among the holders of its class, from 1
        return deal(labels, holds * (part + (place <= rest)), rng)


@component
class Sparsity:
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

    target_client: ClassVar[bool] = True

    labels_per_client: Count
    covered: Switch = False

    def split(
        self, labels: ArrayLike, clients: int, rng: np.random.Generator, num_classes: int | None = None
    ) -> list[IntArray]:
        """Divide as many samples as equal numbers allow; see `Rule.split`."""
        labels, class_sizes = check_samples(labels, clients, rng, num_classes)
        classes = len(class_sizes)
        if clients < 2:
            raise PartitionError("the last client is the target, so one client leaves none to train: take 2 or more")
        if self.labels_per_client > classes:
            raise PartitionError(
                f"a client can't hold {self.labels_per_client} of {classes} classes: lower labels_per_client"
            )
        held = np.argsort(rng.random((clients, classes)), axis=1)[:, : self.labels_per_client]
        trained = np.unique(held[:-1])
        if self.covered and not np.isin(held[-1], trained).all():
            held[-1] = rng.permutation(trained)[: self.labels_per_client]  # as if drawn again until it is covered
        holds = np.zeros((clients, classes), dtype=np.int64)
        np.put_along_axis(holds, held, 1, axis=1)
        holders = holds.sum(axis=0)
        used = np.flatnonzero(holders)
        quota = class_sizes[used] // holders[used]
        scarce = used[np.argmin(quota)]
        if quota.min() == 0:
            raise PartitionError(
                f"class {scarce} has {class_sizes[scarce]} samples for {holders[scarce]} holders: lower clients or "
                "labels_per_client"
            )
        return deal(labels, holds * quota.min(), rng)
