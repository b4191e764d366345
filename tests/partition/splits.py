"""What the tests of partition rules share."""

from collections.abc import Sequence

import numpy as np

from fedskew.partition import INDEX

CIFAR_LABELS = np.repeat(np.arange(10), 5000)
DirichletWithinDomains, IID, Natural, OneLabelMissing = (
    INDEX[name] for name in ("dirichlet_within_domains", "iid", "natural", "one_label_missing")
)


def labelled(*sizes: int) -> np.ndarray:
    """So many samples of each class."""
    return np.repeat(np.arange(len(sizes)), sizes)


def counts_of(split: Sequence[np.ndarray], labels: np.ndarray, classes: int = 10) -> np.ndarray:
    return np.stack([np.bincount(labels[held], minlength=classes) for held in split])


def dealt(rule, clients: int, labels: np.ndarray = CIFAR_LABELS, seed: int | np.random.Generator = 0) -> np.ndarray:
    """The label counts of a rule's clients, `(clients, classes)`."""
    return counts_of(rule.split(labels, clients, np.random.default_rng(seed)), labels, labels.max() + 1)
