from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import OnSimplex, build, unit_rows, with_features


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def simplex(classes: int, generator: torch.Generator) -> torch.Tensor:
    """The corners that a network of so many outputs is compared with."""
    return OnSimplex(build("logistic", classes, (1,)), 1.0, learnt=False, generator=generator).head.weight.detach()


@pytest.mark.parametrize("classes", [2, 3, 10, 200])
def test_corners_have_length_1_and_are_as_far_apart_as_can_be(classes):
    corners = simplex(classes, drawn()).double().numpy()
    expected = np.full((classes, classes), -1 / (classes - 1))
    np.fill_diagonal(expected, 1)
    np.testing.assert_allclose(corners @ corners.T, expected, atol=1e-6)
    np.testing.assert_allclose(corners.sum(axis=0), 0, atol=1e-5)


def test_it_is_the_generators_and_no_other_source_is_read():
    before = torch.get_rng_state()
    assert torch.equal(simplex(7, drawn(3)), simplex(7, drawn(3)))
    assert not torch.allclose(simplex(7, drawn(3)), simplex(7, drawn(4)), atol=0.1)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_turned_uniformly_whatever_signs_a_decomposition_chooses():
    # The sign of a corner's first coordinate would be that of the decomposition; and its mean square is 1 / C.
    first = torch.stack([simplex(3, drawn(seed))[0] for seed in range(400)])
    assert (first > 0).float().mean(dim=0).sub(0.5).abs().max() < 0.1
    assert first.square().mean(dim=0).sub(1 / 3).abs().max() < 0.06


def test_one_class_has_no_simplex():
    with pytest.raises(ArgumentError, match="classes: a simplex needs two corners at least, got 1"):
        simplex(1, drawn())


@pytest.mark.parametrize(("name", "shape"), [("logistic", (4,)), ("mlp3", (1, 8, 8)), ("lenet5", (1, 28, 28))])
def test_logits_are_the_scaled_cosines_of_any_networks_outputs_with_the_corners(name, shape):
    network = build(name, 5, shape, generator=drawn(1))
    x = torch.randn(6, *shape, generator=drawn(2))
    outputs = network(x)
    fixed = OnSimplex(network, 3.0, learnt=True, generator=drawn())
    cosines = unit_rows(outputs) @ simplex(5, drawn()).T
    torch.testing.assert_close(fixed(x), 3 * cosines)
    features, logits = with_features(fixed)(x)
    torch.testing.assert_close(features, outputs)
    torch.testing.assert_close(logits, 3 * cosines)


@pytest.mark.parametrize("learnt", [True, False])
def test_everything_is_trained_but_the_corners_and_a_fixed_scale(learnt):
    network = OnSimplex(build("mlp3", 5, (4,), width=3), 3.0, learnt=learnt, generator=drawn())
    network(torch.ones(2, 4)).square().sum().backward()
    still = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert still == {"head.weight"} | (set() if learnt else {"head.scale"})


def test_outputs_of_zero_have_a_finite_gradient():
    network = build("logistic", 3, (2,))
    network.head.weight.data.zero_()
    network.head.bias.data.zero_()
    OnSimplex(network, 1.0, learnt=True, generator=drawn())(torch.ones(1, 2)).sum().backward()
    assert network.head.weight.grad.abs().max() < 10


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e-8])
def test_rows_of_next_to_no_length_have_a_gradient_that_a_step_survives(size):
    rows = torch.full((1, 4), size, requires_grad=True)
    unit_rows(rows)[0, 0].backward()
    assert rows.grad.abs().max() <= 1
    assert unit_rows(rows).norm() <= 1


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e15])
def test_rows_of_any_other_length_get_length_1(size):
    torch.testing.assert_close(unit_rows(torch.full((1, 4), size)), torch.full((1, 4), 0.5))


def test_a_network_that_says_nothing_of_its_classes_is_refused_with_the_cure():
    with pytest.raises(ArgumentError, match=r"network: Sequential does not say .* give it a linear layer self.head"):
        OnSimplex(nn.Sequential(nn.Linear(3, 2)), 1.0, learnt=True, generator=drawn())
