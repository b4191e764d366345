"""`FlatModel.descend` and the weights whose gradient it never computes, held against PyTorch's own layers and SGD."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedskew.models import FlatModel, WideLinear


class Wide(nn.Module):
    """Two wide layers, the second used `uses` times, and one that nothing passes through."""

    def __init__(self, uses=1):
        super().__init__()
        self.uses = uses
        self.first, self.second, self.idle = WideLinear(7, 5), WideLinear(5, 5), WideLinear(3, 2, bias=False)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(self.uses):
            x = self.second(x)
        return x


def network(uses=1):
    torch.manual_seed(0)
    return Wide(uses)


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


X, Y = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 4, 2])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_wide_weight_descends_without_its_gradient(momentum, weight_decay):
    assert assert_descends_as_sgd(network(), X, Y, momentum, weight_decay) == set()


def test_a_layer_that_is_used_twice_has_a_gradient():
    assert assert_descends_as_sgd(network(2), X, Y, 0.9, 0.1) == {"second.weight"}


def test_a_layer_on_more_than_a_batch_of_rows_has_a_gradient():
    x, y = torch.randn(2, 3, 7), torch.tensor([[0, 1, 4], [2, 2, 3]])
    assert assert_descends_as_sgd(network(), x, y) == {"first.weight", "second.weight"}


def test_a_weight_of_two_layers_has_a_gradient():
    module = nn.Sequential(network(), WideLinear(5, 5))
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
    layer = WideLinear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    FlatModel(layer).descend(lambda: 3 * layer(torch.ones(2, 1)).sum(), [], 0.5)
    assert layer.weight.item() == 1 - 0.5 * 6


def test_an_objective_that_fails_leaves_no_hook_behind():
    module = network()
    with pytest.raises(ZeroDivisionError):
        FlatModel(module).descend(lambda: module(X).sum() / (1 // 0), [], 0.1)
    assert not any(layer._forward_hooks for layer in module.modules())
