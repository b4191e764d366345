from __future__ import annotations

import numpy as np
import pytest
import torch

from fedskew.objectives.functional import fedmr
from losses import feddecorr


def by_formula(features):
    """The authors' code (bytedance/FedDecorr 973e4af), with the correlation matrix written out."""
    scaled = (features - features.mean(axis=0)) / np.sqrt(1e-8 + features.var(axis=0, ddof=1))
    matrix = scaled.T @ scaled
    return (matrix[~np.eye(len(matrix), dtype=bool)] ** 2).mean() / len(features)


@pytest.mark.parametrize("rows", [2, 6, 40])
@pytest.mark.parametrize("dim", [2, 5])
def test_the_formula(rows, dim):
    features = np.random.default_rng(4).normal(size=(rows, dim)) * [10.0**at for at in range(dim)]
    assert feddecorr(torch.tensor(features)).item() == pytest.approx(by_formula(features), rel=1e-9)


def test_it_is_fedmrs_term_where_the_batch_has_one_class():
    features = torch.tensor(np.random.default_rng(1).normal(size=(7, 4)))
    assert torch.equal(feddecorr(features), fedmr(features, torch.full((7,), 3)))


def test_a_single_sample_and_features_that_never_vary_add_nothing():
    one = torch.ones(1, 3, requires_grad=True)
    value = feddecorr(one)
    value.backward()
    assert value == 0
    assert (one.grad == 0).all()
    same = torch.ones(4, 3, requires_grad=True)
    feddecorr(same).backward()
    assert same.grad.isfinite().all()


def test_in_float32_it_keeps_its_digits_at_the_size_of_a_real_layer():
    features = np.random.default_rng(4).normal(size=(64, 512))
    value = feddecorr(torch.tensor(features, dtype=torch.float32))
    assert value.item() == pytest.approx(by_formula(features), rel=1e-4)
