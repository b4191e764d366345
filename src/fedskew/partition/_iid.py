"""Rules in which clients hold random parts of the same labels: `IID`, and FedLA's `IIDAndExclusive`."""

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from fedskew.errors import PartitionError
from fedskew.parameters import Count, IntArray, Share, component
from fedskew.partition._rule import Rule, check_samples
from fedskew.tables import counted


@component
class IID(Rule):
    """Samples are dealt at random, in parts of one size: every client's label mix is that of all, up to chance.

    This is what the papers call IID: the yardstick for what label skew costs. Sizes differ by one at most.
    """

    def split(self, labels: ArrayLike, clients: int, rng: Generator, num_classes: int | None = None) -> list[IntArray]:
        """Divide all samples; see `Rule.split`."""
        labels, _ = check_samples(labels, clients, rng, num_classes)
        if len(labels) < clients:
            raise PartitionError(f"clients: {clients} are more than there are samples, {len(labels)}; lower it")
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@component
class IIDAndExclusive(Rule):
    """Gives some clients exclusive labels and the others IID samples of the remaining labels; all have one size.

    The partition of FedLA (Khalil et al., 2023), by the paper's text. Of K clients, floor(exclusive_share * K) hold
    `labels_per_client` classes each that no other client has, in equal parts; the others draw uniformly, without
    replacement, from all samples of the classes that remain. The exclusive clients come first; which classes they own
    is drawn. The authors' code deals consecutive classes from a random start instead, so that their clients overlap.

    Attributes:
        exclusive_share: Share of the exclusive clients, the paper's noniid_s.
        labels_per_client: Classes of each exclusive client, the paper's unique_c.
        samples_per_client: Samples of each client; 2400 for EMNIST and 1000 for CIFAR-100 in the paper.
    """

    exclusive_share: Share
    labels_per_client: Count
    samples_per_client: Count

    def _counts(self, class_sizes: IntArray, clients: int, rng: Generator) -> IntArray:
        classes = len(class_sizes)
        exclusive = math.floor(self.exclusive_share * clients + 1e-9)
        taken = exclusive * self.labels_per_client
        if taken > classes or (taken == classes and exclusive < clients):
            raise PartitionError(
                f"{classes} classes don't give {self.labels_per_client} to each of {counted(exclusive, 'client')} and "
                "leave one for the others: lower exclusive_share or labels_per_client"
            )
        order = rng.permutation(classes)
        counts = np.zeros((clients, classes), dtype=np.int64)
        part, rest = divmod(self.samples_per_client, self.labels_per_client)
        parts = part + (np.arange(self.labels_per_client) < rest)
        owned = order[:taken].reshape(exclusive, self.labels_per_client)
        np.put_along_axis(counts[:exclusive], owned, parts[None, :], axis=1)
        short = np.flatnonzero(counts.sum(axis=0) > class_sizes)
        if len(short):
            raise PartitionError(
                f"class {short[0]} has {counted(class_sizes[short[0]], 'sample')} and its owner needs "
                f"{counts[:, short[0]].sum()}: lower samples_per_client or raise labels_per_client"
            )

        shared = order[taken:]
        pool = np.repeat(shared, class_sizes[shared])
        needed = (clients - exclusive) * self.samples_per_client
        if needed > len(pool):
            raise PartitionError(
                f"the {len(shared)} classes that no client owns have {len(pool)} samples and {clients - exclusive} "
                f"clients need {needed}: lower samples_per_client"
            )
        drawn = rng.permutation(pool)[:needed]
        client = np.repeat(np.arange(exclusive, clients), self.samples_per_client)
        counts += np.bincount(client * classes + drawn, minlength=clients * classes).reshape(clients, classes)
        return counts
