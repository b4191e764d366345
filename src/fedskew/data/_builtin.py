"""Data sets that need no file: scikit-learn's digits and the synthetic task of FedPALS."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedskew.data._dataset import Dataset, names_clients
from fedskew.errors import ArgumentError

_MEANS = np.array([[6.0, 4.6], [1.2, -1.6], [4.6, -5.4]])
_COUNTS = np.array([[20, 20, 0], [9, 0, 9]])
_TEST = 2000


def digits() -> Dataset:
    """Load scikit-learn's digits: 1,797 grey images of 8 x 8, digits 0 to 9.

    Values are in [0, 1] (their 17 levels divided by 16), not normalised further. Every fourth sample of each class, in
    the order of the file, is the test part, the same for every seed.
    """
    table = torch.from_numpy(_digits_table())
    inputs = table[:, :64].float().div_(16).view(-1, 1, 8, 8)
    targets = table[:, 64].long()
    test = torch.zeros(len(targets), dtype=torch.bool)
    for label in range(10):
        test[torch.nonzero(targets == label).flatten()[3::4]] = True
    return Dataset("digits", inputs[~test], targets[~test], inputs[test], targets[test], classes=tuple("0123456789"))


@cache
def _digits_table() -> NDArray[np.uint8]:
    """Read the levels of 64 pixels and a label a row from scikit-learn's file; to import its package takes seconds.

    A release that keeps the file elsewhere is imported.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        return np.loadtxt(path, delimiter=",", dtype=np.uint8)
    except OSError:
        from sklearn.datasets import load_digits

        levels, labels = load_digits(return_X_y=True)
        return np.column_stack([levels, labels]).astype(np.uint8)


@names_clients
def synthetic(rng: np.random.Generator | None, delta: float = 0.5) -> Dataset:
    """Draw FedPALS' synthetic task: three Gaussian classes in the plane, two clients, a target outside their hull.

    Classes have unit covariance. Client S1 holds 20 samples each of classes 0 and 1, S2 holds 9 each of 0 and 2 (the
    paper's shares, as exact counts). The target mix is (1 - delta)(1/2, 1/4, 1/4) + delta (0, 1/2, 1/2): its squared
    distance to the clients' hull is 0.375 delta^2. The test part is 2000 samples drawn from that mix. Nothing is
    normalised.

    Args:
        delta: In [0, 1].
    """
    if rng is None:
        raise ArgumentError("rng: the synthetic task is drawn at random; pass a numpy Generator")
    if not 0.0 <= delta <= 1.0:
        raise ArgumentError(f"delta: must be in [0, 1], got {delta}")
    target = (1 - delta) * np.array([0.5, 0.25, 0.25]) + delta * np.array([0.0, 0.5, 0.5])
    clients, labels = np.nonzero(_COUNTS)
    counts = _COUNTS[clients, labels]
    targets = np.repeat(labels, counts)
    test_targets = rng.choice(3, size=_TEST, p=target)
    return Dataset(
        "synthetic",
        _draw(targets, rng),
        torch.from_numpy(targets),
        _draw(test_targets, rng),
        torch.from_numpy(test_targets),
        classes=("0", "1", "2"),
        clients=np.repeat(clients, counts),
        client_names=("S1", "S2"),
        target=target,
    )


def _draw(labels: np.ndarray, rng: np.random.Generator) -> Tensor:
    return torch.from_numpy((_MEANS[labels] + rng.normal(size=(len(labels), 2))).astype(np.float32))
