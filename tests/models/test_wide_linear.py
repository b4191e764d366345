from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedskew.models import FlatModel, Product, WideLinear


class Wide(nn.Module):
    """Two wide layers, the second used `uses` times, and one that nothing passes through."""

    def __init__(self, uses=1, layer=WideLinear):
        super().__init__()
        self.uses = uses
        self.first, self.second, self.idle = layer(7, 5), layer(5, 5), layer(3, 2)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(self.uses):
            x = self.second(x)
        return x


def network(uses=1, layer=WideLinear):
    torch.manual_seed(0)
    return Wide(uses, layer)


def of_both(uses, x, y):
    """Gradients in parts, and those of the same network of PyTorch's own layers."""
    flat, plain = FlatModel(network(uses)), network(uses, nn.Linear)

    def value(module):
        return cross_entropy(module(x).flatten(0, -2), y.flatten())

    value(plain).backward()
    parts = dict(zip(flat.names, flat.gradients(lambda: value(flat.module)), strict=True))
    return parts, {name: p.grad for name, p in plain.named_parameters()}


def dense(part):
    return part.dense() if isinstance(part, Product) else part


@pytest.mark.parametrize(("uses", "products"), [(1, {"first.weight", "second.weight"}), (2, {"first.weight"})])
def test_the_product_is_the_gradient_where_a_layer_is_used_once(uses, products):
    parts, expected = of_both(uses, torch.randn(4, 7), torch.tensor([0, 1, 4, 2]))
    assert {name for name, part in parts.items() if isinstance(part, Product)} == products
    for name, part in parts.items():
        theirs = torch.zeros_like(dense(part)) if expected[name] is None else expected[name]
        torch.testing.assert_close(dense(part), theirs)


def test_of_more_than_a_batch_of_rows_it_is_a_whole_gradient():
    parts, expected = of_both(1, torch.randn(2, 3, 7), torch.tensor([[0, 1, 4], [2, 2, 3]]))
    assert not any(isinstance(part, Product) for part in parts.values())
    torch.testing.assert_close(parts["first.weight"], expected["first.weight"])


def test_two_layers_of_one_weight_have_a_whole_gradient():
    module = network()
    module.idle = WideLinear(5, 5)
    module.idle.weight = module.second.weight
    flat = FlatModel(nn.Sequential(module, module.idle))
    x, y = torch.randn(4, 7), torch.tensor([0, 1, 4, 2])
    parts = dict(zip(flat.names, flat.gradients(lambda: cross_entropy(flat.module(x), y)), strict=True))
    (expected,) = torch.autograd.grad(cross_entropy(flat.module(x), y), [module.second.weight])
    torch.testing.assert_close(parts["0.second.weight"], expected)


def test_a_frozen_layer_has_none():
    module = network()
    module.first.weight.requires_grad_(False)
    flat = FlatModel(module)
    parts = dict(zip(flat.names, flat.gradients(lambda: flat.module(torch.randn(4, 7)).sum()), strict=True))
    assert "first.weight" not in parts
    assert isinstance(parts["second.weight"], Product)


def test_nothing_is_watched_afterwards():
    flat = FlatModel(network())
    with pytest.raises(ZeroDivisionError):
        flat.gradients(lambda: flat.module(torch.randn(4, 7)).sum() / (1 // 0))
    assert not any(layer._forward_hooks for layer in flat.module.modules())
