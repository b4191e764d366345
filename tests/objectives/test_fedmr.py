from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.objectives.functional import fedmr


def by_formula(features, targets):
    """Methods 2.11, class by class, with the correlation matrices written out."""
    total, used = 0.0, 0
    for label in set(targets.tolist()):
        of_class = features[targets == label]
        if len(of_class) < 2:
            continue
        scaled = (of_class - of_class.mean(axis=0)) / np.sqrt(of_class.var(axis=0, ddof=1) + 1e-8)
        matrix = scaled.T @ scaled
        total += (matrix[~np.eye(len(matrix), dtype=bool)] ** 2).mean()
        used += len(of_class)
    return total / used if used else 0.0


@pytest.mark.parametrize("targets", [[0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0, 1, 2, 0, 3, 0], [5, 9, 9, 5, 2, 2]])
@pytest.mark.parametrize("dim", [2, 5])
def test_the_formula(targets, dim):
    features = np.random.default_rng(4).normal(size=(6, dim)) * [10.0**at for at in range(dim)]
    value = fedmr(torch.tensor(features), torch.tensor(targets))
    assert value.item() == pytest.approx(by_formula(features, np.array(targets)), rel=1e-9)


def test_classes_of_one_sample_and_features_that_never_vary_add_nothing():
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = fedmr(features, torch.tensor([0, 1, 2, 3]))
    value.backward()
    assert value == 0
    assert (features.grad == 0).all()
    same = torch.ones(4, 3, requires_grad=True)
    fedmr(same, torch.zeros(4, dtype=torch.int64)).backward()
    assert same.grad.isfinite().all()


def test_in_float32_it_keeps_its_digits_at_the_size_of_a_real_layer():
    features = np.random.default_rng(4).normal(size=(64, 84))
    targets = np.arange(64) % 3
    value = fedmr(torch.tensor(features, dtype=torch.float32), torch.tensor(targets))
    assert value.item() == pytest.approx(by_formula(features, targets), rel=1e-4)
