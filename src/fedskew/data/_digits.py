"""The digits that ship with scikit-learn (Alpaydin, Kaynak 1998; UCI's optical recognition of handwritten digits)."""

from __future__ import annotations

import torch

from fedskew.data._dataset import Dataset


def digits() -> Dataset:
    """1,797 grey pictures of 8 x 8, digits 0 to 9, values in [0, 1] (their 17 levels by 16), not normalised further.

    Every fourth sample of each class, in the order of the file, is the test part: the same for every seed.
    """
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(values).float().div_(16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    test = torch.zeros(len(targets), dtype=torch.bool)
    for label in range(10):
        test[torch.nonzero(targets == label).flatten()[3::4]] = True
    return Dataset(
        name="digits",
        inputs=inputs[~test],
        targets=targets[~test],
        test_inputs=inputs[test],
        test_targets=targets[test],
        classes=tuple("0123456789"),
    )
