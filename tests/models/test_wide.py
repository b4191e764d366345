"""Convolutions of many weights on small images, as products, are PyTorch's convolutions."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import Residual
from fedskew.models import FlatModel
from fedskew.models._chain import Convolution
from fedskew.models._wide import MANY, ByProducts, windows_of

WIDE = {"padding": 1}, {"stride": 2, "padding": (1, 0)}, {"dilation": (1, 2), "padding": 2, "bias": False}, {}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def convolution(last: bool, **options: object) -> nn.Conv2d:
    layer: nn.Conv2d = nn.Conv2d(192, 320, 3, dtype=torch.float64, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for own in layer.parameters():
            own.copy_(drawn(*own.shape))
    return layer.to(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("options", WIDE, ids=str)
def test_values_and_gradients_are_those_of_the_convolution(options, last):
    layer, x = convolution(last, **options), drawn(3, 192, 4, 5).requires_grad_()
    assert windows_of(x, layer.weight, layer.stride, layer.padding, layer.dilation) is not None
    y = layer(x)
    slope = drawn(*y.shape)
    expected = torch.autograd.grad(y, (x, *layer.parameters()), slope)
    with ByProducts():
        ours = layer(x)
    assert torch.allclose(ours, y, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(ours, (x, *layer.parameters()), slope)
    for own in layer.parameters():
        own.grad = torch.full_like(own, torch.nan)
    stage = Convolution(layer, first=False)
    with torch.no_grad():
        assert torch.allclose(stage.forward(x.detach()), y, rtol=1e-12, atol=1e-12)
        chained = [stage.backward(slope), *(own.grad for own in layer.parameters())]
    for way in (found, chained):
        assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-10) for pair in zip(way, expected, strict=True))


def test_others_stay_pytorchs():
    x, weight = torch.zeros(2, 256, 2, 2), torch.zeros(256, 256, 3, 3)
    assert weight.numel() >= MANY
    assert windows_of(x, weight, 1, 1) is not None
    assert windows_of(x, weight, 1, "same") is None
    assert windows_of(torch.zeros(129, 256, 2, 2), weight, 1, 1) is None  # 516 values of each of 256 channels
    assert windows_of(x, weight[:200], 1, 1) is None
    assert windows_of(torch.zeros(2, 1024, 2, 2), torch.zeros(512, 1024, 1, 1)) is None
    assert windows_of(torch.zeros(2, 512, 2, 2), torch.zeros(512, 256, 3, 3), 1, 1, 1, 2) is None


@pytest.mark.parametrize("options", [{}, {"padding": (1,)}, {"stride": 0, "padding": 1}], ids=str)
@pytest.mark.parametrize("channels", [255, 256])
def test_what_is_wrong_or_unusual_is_pytorchs(channels, options):
    layer, x = nn.Conv2d(256, 256, 3, **options), torch.ones(2, channels, 2, 2)
    try:
        expected = layer(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(error))}$"), ByProducts():
            layer(x)
    else:
        with ByProducts():
            assert torch.equal(layer(x), expected)


def each_of_its_own(layer, x):
    scaled = torch.stack([layer.weight, 2 * layer.weight])
    return torch.vmap(lambda one, weight: nn.functional.conv2d(one[None], weight, padding=1)[0])(x, scaled)


@pytest.mark.parametrize("way", [partial(checkpoint, use_reentrant=False), each_of_its_own])
def test_layers_that_are_computed_anew_or_mapped_are_trained(way):
    model = FlatModel(Residual(256, way))
    model.network.train()
    model.differentiate(torch.ones(2, 256, 2, 2), lambda outputs: outputs.logits.square().sum())
    assert model.views(model.gradient)["convolution.weight"].any()


def test_a_network_with_branches_is_trained_by_them():
    model = FlatModel(Residual(256))
    model.network.train()
    with torch.profiler.profile() as profile:
        model.differentiate(torch.ones(2, 256, 2, 2), lambda outputs: outputs.logits.square().sum())
    names = {event.name for event in profile.events()}
    assert "aten::im2col" in names
    assert not any("convolution" in name for name in names)
