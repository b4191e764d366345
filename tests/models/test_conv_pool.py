from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedskew.models.conv_pool import ConvPoolReLU

# Few channels out (rows in pairs), few in (the input's gradient in pairs), both, neither, an odd side of the output.
SHAPES = [
    ((40, 3, 32, 32), 6, (5, 5)),
    ((40, 6, 14, 14), 16, (5, 5)),
    ((33, 8, 13, 14), 4, (4, 3)),
    ((33, 12, 10, 12), 20, (3, 3)),
    ((33, 3, 12, 12), 6, (4, 4)),
]


def outputs_and_gradients(whole: bool, shape: tuple[int, ...], channels: int, kernel: tuple[int, int]) -> list[Tensor]:
    """Both forms' output and gradients of a random layer; in whole numbers sums are exact, and ties many."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        values = torch.randn(size, generator=generator)
        return values.round() if whole else values

    layer = nn.Conv2d(shape[1], channels, kernel).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(*parameter.shape))
    x = draw(*shape).requires_grad_()
    results = []
    for form in (lambda: relu(max_pool2d(layer(x), 2)), lambda: ConvPoolReLU(layer)(x)):
        y = form()
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], direction.round() if whole else direction)
        results.append([y.detach(), *gradients])
    return results


@pytest.mark.parametrize(("shape", "channels", "kernel"), SHAPES)
@pytest.mark.parametrize("whole", [True, False], ids=["whole numbers", "any numbers"])
def test_it_is_convolution_pooling_and_relu_with_the_same_choice_between_ties(shape, channels, kernel, whole):
    for one, other in zip(*outputs_and_gradients(whole, shape, channels, kernel), strict=True):
        rounding = 0 if whole else 1e-5
        torch.testing.assert_close(other, one, rtol=rounding, atol=rounding * float(one.abs().max()))


def test_a_frozen_layer_and_a_layer_without_gradient_give_the_same():
    layer = nn.Conv2d(3, 6, 5)
    x = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = relu(max_pool2d(layer(x), 2))
    layer.weight.requires_grad_(False)
    (gradient,) = torch.autograd.grad(ConvPoolReLU(layer)(x).sum(), [layer.bias])
    assert gradient.shape == (6,)
    with torch.no_grad():
        torch.testing.assert_close(ConvPoolReLU(layer)(x), expected)


def test_it_can_be_mapped_over_a_cohort():
    layers = [nn.Conv2d(3, 6, 5) for _ in range(2)]
    stacked = {
        f"0.{name}": torch.stack([getattr(layer, name).detach() for layer in layers]) for name in ("weight", "bias")
    }
    x = torch.randn(2, 40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pooled = nn.Sequential(nn.Conv2d(3, 6, 5))
    pooled.forward = lambda x: ConvPoolReLU(pooled[0])(x)

    def total(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(pooled, parameters, (x,)).sum()

    gradients = torch.func.vmap(torch.func.grad(total))(stacked, x)
    for place, layer in enumerate(layers):
        (alone,) = torch.autograd.grad(ConvPoolReLU(layer)(x[place]).sum(), [layer.weight])
        torch.testing.assert_close(gradients["0.weight"][place], alone, rtol=1e-4, atol=1e-3)
