"""`FlatModel.descend` and the weights whose gradient it never computes, held against PyTorch's own SGD."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedskew.models import FlatModel

SIDE = 1024
"""A layer of this many inputs and outputs is wide: it has 2 ** 20 weights."""


class Wide(nn.Module):
    """Two wide layers, the second used `uses` times, and one that nothing passes through; `also` reads the second."""

    def __init__(self, uses=1, also=None):
        super().__init__()
        self.uses, self.also = uses, also
        self.first, self.second, self.idle = (nn.Linear(SIDE, SIDE, bias=place < 2) for place in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(self.uses):
            x = self.second(x)
        return x if self.also is None else x + self.also(self.second.weight)


def network(uses=1, also=None):
    torch.manual_seed(0)
    return Wide(uses, also)


def whole_gradients(module):
    """Names of the parameters whose gradient is computed from here on, by the first hook on each."""
    seen = set()
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.add(name))
    return seen


def assert_descends_as_sgd(module, x, y, momentum=0.0, weight_decay=0.0):
    """Three steps of `descend` and of `torch.optim.SGD`; returns the names of the gradients that were computed."""
    plain = copy.deepcopy(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=momentum, weight_decay=weight_decay)
    flat = FlatModel(module)
    velocity = flat.parts(torch.zeros_like(flat.vector)) if momentum else []
    seen = whole_gradients(module)
    for _ in range(3):
        flat.descend(
            lambda: cross_entropy(module(x).flatten(0, -2), y.flatten()), velocity, 0.3, momentum, weight_decay
        )
        optimizer.zero_grad()
        value = cross_entropy(plain(x).flatten(0, -2), y.flatten())
        value.backward()
        for parameter in plain.parameters():  # `descend` takes a parameter without gradient for one of gradient zero
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    return {name for name in seen if name.endswith("weight")}


X, Y = torch.randn(4, SIDE, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 4, 2])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_wide_weight_descends_without_its_gradient(momentum, weight_decay):
    assert assert_descends_as_sgd(network(), X, Y, momentum, weight_decay) == set()


def test_a_layer_that_is_used_twice_has_a_gradient():
    assert assert_descends_as_sgd(network(2), X, Y, 0.9, 0.1) == {"second.weight"}


def test_a_layer_on_more_than_a_batch_of_rows_has_a_gradient():
    x, y = torch.randn(2, 3, SIDE), torch.tensor([[0, 1, 4], [2, 2, 3]])
    assert assert_descends_as_sgd(network(), x, y) == {"first.weight", "second.weight"}


def test_a_weight_of_two_layers_has_a_gradient():
    module = nn.Sequential(network(), nn.Linear(SIDE, SIDE))
    module[1].weight = module[0].second.weight
    assert "0.second.weight" in assert_descends_as_sgd(module, X, Y)


def test_a_frozen_weight_stays():
    module = network()
    module.first.weight.requires_grad_(False)
    before = module.first.weight.clone()
    flat = FlatModel(module)
    flat.descend(lambda: module(X).sum(), [], 0.1)
    assert torch.equal(module.first.weight, before)


def test_a_weight_without_bias_may_be_all_there_is():
    layer = nn.Linear(SIDE, SIDE, bias=False)
    nn.init.ones_(layer.weight)
    FlatModel(layer).descend(lambda: 3 * layer(torch.ones(2, SIDE)).sum(), [], 0.5)
    assert layer.weight.unique().tolist() == [1 - 0.5 * 6]


@pytest.mark.parametrize("also", [lambda weight: weight[0], lambda weight: nn.functional.linear(X, weight)])
def test_a_weight_that_is_read_beside_its_layer_has_a_gradient(also):
    assert assert_descends_as_sgd(network(also=also), X, Y, 0.9) == {"second.weight"}


def test_a_layer_whose_output_a_hook_changes_has_a_gradient():
    module = network()
    module.first.register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)
    assert assert_descends_as_sgd(module, X, Y) == {"first.weight"}


def test_a_narrow_layer_has_a_gradient():
    module = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, 5))
    assert assert_descends_as_sgd(module, X, Y) == {"1.weight"}


def test_an_objective_that_fails_leaves_no_hook_behind():
    module = network()
    with pytest.raises(ZeroDivisionError):
        FlatModel(module).descend(lambda: module(X).sum() / (1 // 0), [], 0.1)
    assert not any(layer._forward_hooks for layer in module.modules())
