from __future__ import annotations

import numpy as np
import pytest
import torch

from losses import classifier_variance, uniformity

RNG = np.random.default_rng(6)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("rows", [2, 7, 40])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_variance_term_is_the_authors(rows, classes):
    """sonhamin/FedUV dd2e3c5: gamma is the mean standard deviation, unbiased, of the columns of an identity matrix."""
    logits = RNG.normal(scale=2, size=(rows, classes))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    gamma = np.eye(classes).std(axis=0, ddof=1).mean()
    expected = np.maximum(gamma - shares.std(axis=0, ddof=1), 0).mean()
    assert classifier_variance(double(logits)).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rows", [2, 3, 8, 20])
def test_the_uniformity_term_is_the_authors(rows):
    """The median of squared distances that aren't 0 (PyTorch's: the lower middle one) is the bandwidth."""
    features = RNG.normal(size=(rows, 4)).round(1)
    features[-1] = features[0]  # a pair at distance 0
    distances = torch.pdist(double(features)).pow(2)
    apart = distances[distances != 0]
    expected = (-distances / (apart.median() if len(apart) else 1)).exp().mean()
    assert uniformity(double(features)).item() == pytest.approx(expected.item(), rel=1e-9)


def test_features_have_no_scale_and_no_origin():
    features = double(RNG.normal(size=(9, 5)))
    torch.testing.assert_close(uniformity(1000 * features + 7), uniformity(features))
    features.requires_grad_()
    uniformity(features).backward()
    # Along the features themselves, and along a shift of all of them, nothing changes.
    assert (features.grad * features.detach()).sum().abs() < 1e-12
    assert features.grad.sum(dim=0).abs().max() < 1e-12


@pytest.mark.parametrize("function", [classifier_variance, uniformity])
@pytest.mark.parametrize("rows", [torch.zeros(1, 3), torch.ones(5, 3), torch.tensor([[1e-20, 0, 0], [0, 0, 0]])])
def test_rows_that_are_alone_or_equal_or_nearly_have_finite_gradients(function, rows):
    rows = rows.clone().requires_grad_()
    value = function(rows)
    value.backward()
    assert value.isfinite()
    assert rows.grad.isfinite().all()
    assert rows.grad.abs().max() <= 1


def test_equal_features_count_as_distance_0_also_where_rounding_makes_it_something():
    features = torch.tensor(RNG.normal(size=(3, 300)), dtype=torch.float32).repeat(7, 1) + 100
    distances = torch.cdist(features.double(), features.double())[np.triu_indices(21, 1)].square()
    apart = distances[distances > 1e-6]
    expected = torch.where(distances > 1e-6, (-distances / apart.median()).exp(), 1).mean()
    assert uniformity(features).item() == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.slow
def test_batches_whose_medians_lie_at_other_places_are_mapped_at_once():
    rows = double(RNG.normal(size=(5, 8, 3)))
    rows[1, 4:] = rows[1, :4]
    masks = torch.arange(8) < torch.tensor([8, 8, 5, 2, 1]).unsqueeze(1)
    together = torch.func.vmap(torch.func.grad_and_value(uniformity))(rows, masks)
    alone = [torch.func.grad_and_value(uniformity)(*one) for one in zip(rows, masks, strict=True)]
    torch.testing.assert_close(together[1], torch.stack([value for _, value in alone]))
    torch.testing.assert_close(together[0], torch.stack([gradient for gradient, _ in alone]))
