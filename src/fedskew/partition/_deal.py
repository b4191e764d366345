"""From how many samples of each class each client gets, to which."""

from __future__ import annotations

import numpy as np

from fedskew.partition._protocol import IntArray


def deal(labels: IntArray, counts: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Draw `counts[client, class]` samples of each class for each client, uniformly and without replacement.

    `labels`: `(samples,)`; `counts`: `(clients, classes)`, whose column sums are at most the class sizes. Every rule
    ends here, so all that a rule decides is its table of counts. Returns one ascending index array per client.
    """
    clients, classes = counts.shape
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    undealt = np.bincount(labels, minlength=classes) - counts.sum(axis=0)
    # One more row stands for nobody. Class after class, each client's number is repeated as often as it gets a sample.
    table = np.vstack([counts, undealt])
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(clients + 1), classes), table.T.ravel())
    by_owner = np.argsort(owner, kind="stable")
    return np.split(by_owner, np.cumsum(table.sum(axis=1))[:-1])[:clients]
