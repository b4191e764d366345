"""MNIST as FedVLS's authors divide and measure it (krumpguo/FedVLS, system/data/generate_mnist.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedskew.data._dataset import Dataset, names_clients
from fedskew.data._idx import mnist_arrays
from fedskew.data._images import normalised
from fedskew.errors import ArgumentError

_MEAN, _STD = (0.5,), (0.5,)
_CLASSES = tuple("0123456789")
_MOST_TRIES = 10_000


@names_clients
def fedvls_mnist(
    root: Path,
    beta: float = 0.05,
    clients: int = 10,
    measured: Literal["training", "held-out"] = "training",
    smallest: int = 256,
    seed: int = 1,
    verify: bool = True,
) -> Dataset:
    """Read MNIST in the division of FedVLS's public code, which names the clients: partition rule "natural".

    All 70,000 images are pooled, and a quarter of them is set aside; each class of the rest is divided among the
    clients by Dir(beta), with the balance rule, until every client holds `smallest` images. All draws are NumPy's
    legacy ones, in the code's order, so that `seed` 1 gives its clients. Pixels are in [-1, 1] (mean and deviation
    0.5).

    Args:
        root: Holds the files of `mnist`.
        beta: Concentration of the Dirichlet distribution.
        clients: Number of clients.
        measured: What the test part is: "training", all clients' own images, which the code hands to its test; or
            "held-out", the quarter that no client has.
        smallest: Images that every client must hold: 64 / 0.25 in the code.
        seed: Seed of the draws: 1 in the code.
        verify: As in `mnist`.
    """
    if not beta > 0:
        raise ArgumentError(f"beta: must be above 0, got {beta}")
    if clients < 1:
        raise ArgumentError(f"clients: must be at least 1, got {clients}")
    arrays = mnist_arrays(root, verify)
    pixels, labels = torch.cat(arrays[::2]), torch.cat(arrays[1::2])
    rng = np.random.RandomState(seed)
    order = rng.permutation(len(labels))  # scikit-learn's train_test_split(train_size=0.75)
    kept = int(0.75 * len(labels))
    held_out, training = np.split(order, [len(labels) - kept])
    owner = _owners(labels.numpy()[training], beta, clients, smallest, rng)
    test = training if measured == "training" else held_out
    return Dataset(
        name="fedvls_mnist",
        inputs=normalised(pixels[training], _MEAN, _STD),
        targets=labels[training],
        test_inputs=normalised(pixels[test], _MEAN, _STD),
        test_targets=labels[test],
        classes=_CLASSES,
        mean=_MEAN,
        std=_STD,
        clients=owner,
        client_names=tuple(map(str, range(clients))),
    )


def _owners(
    labels: NDArray[np.int64], beta: float, clients: int, smallest: int, rng: np.random.RandomState
) -> NDArray[np.int64]:
    """Return the client of each image, drawn as the code draws it."""
    fair = len(labels) / clients
    for _ in range(_MOST_TRIES):
        owner = np.empty(len(labels), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for label in range(len(_CLASSES)):
            rows = np.flatnonzero(labels == label)
            rng.shuffle(rows)
            shares = rng.dirichlet(np.full(clients, beta)) * (held < fair)
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(np.int64)[:-1]
            for client, own in enumerate(np.split(rows, cuts)):
                owner[own] = client
                held[client] += len(own)
        if held.min() >= smallest:
            return owner
    raise ArgumentError(
        f"smallest: none of {_MOST_TRIES:,} draws gave {smallest} images to each of {clients} clients; lower it"
    )
