"""What the tests of partition rules share."""

from __future__ import annotations

import numpy as np

CIFAR_LABELS = np.repeat(np.arange(10), 5000)


def counts_of(split: list[np.ndarray], labels: np.ndarray, classes: int = 10) -> np.ndarray:
    return np.stack([np.bincount(labels[held], minlength=classes) for held in split])


def dealt(rule, clients: int, labels: np.ndarray = CIFAR_LABELS, seed: int = 0) -> np.ndarray:
    """The label counts of a rule's clients, `(clients, classes)`."""
    return counts_of(rule.split(labels, clients, np.random.default_rng(seed)), labels, labels.max() + 1)
