from __future__ import annotations

import pytest
import torch
from torch import nn

from fedskew.local_steps import SGD, StepSettings
from fedskew.models import FlatModel


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torch_optim_sgd_to_the_bit(momentum, weight_decay, dtype):
    # Length 37: the vectorised part of an operation and its remainder.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(37, generator=generator, dtype=dtype)
    gradients = torch.randn(10, 37, generator=generator, dtype=dtype)
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.03, momentum=momentum, weight_decay=weight_decay, foreach=False)
    settings = StepSettings(start, 0.03, momentum, weight_decay)
    ours, carried = start, SGD().init(settings)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
        ours, carried = SGD().step(ours, lambda _, given=gradient: given, carried, settings)
        assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_in_place_it_is_the_same_to_the_bit(momentum, weight_decay):
    class Pair(nn.Module):
        """Two parameters of which every objective is the sum, so that they have one gradient between them."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(37)), nn.Parameter(torch.randn(37))

    torch.manual_seed(0)
    model = FlatModel(Pair())
    theirs = model.read()
    settings = StepSettings(theirs, 0.03, momentum, weight_decay)
    carried, own_carried = SGD().init(settings), SGD().init(settings)
    assert (carried == {}) == (momentum == 0)
    parts = {name: model.parts(part) for name, part in own_carried.items()}
    for _ in range(3):
        given = torch.randn(37)
        theirs, carried = SGD().step(theirs, lambda _, given=given: given.repeat(2), carried, settings)
        SGD().step_in_place(
            model, lambda given=given: ((model.module.first + model.module.second) * given).sum(), parts, settings
        )
        assert torch.equal(model.vector, theirs)
        torch.testing.assert_close(own_carried, dict(carried), rtol=0, atol=0)


def test_two_steps_worked_out_by_hand():
    # theta 1, gradient 2 theta, lr 0.1, momentum 0.5, weight decay 1.
    # d = 2 + 1 = 3, b = 3, theta = 0.7. Then d = 1.4 + 0.7 = 2.1, b = 0.5 * 3 + 2.1 = 3.6, theta = 0.7 - 0.36 = 0.34.
    theta = torch.ones(1, dtype=torch.float64)
    settings = StepSettings(theta, lr=0.1, momentum=0.5, weight_decay=1.0)
    carried = SGD().init(settings)
    theta, carried = SGD().step(theta, lambda at: 2 * at, carried, settings)
    theta, carried = SGD().step(theta, lambda at: 2 * at, carried, settings)
    assert theta.item() == pytest.approx(0.34, abs=1e-15)
    assert carried["momentum"].item() == pytest.approx(3.6, abs=1e-15)


def test_the_gradient_is_asked_for_once_and_at_the_present_parameters():
    asked = []

    def gradient(parameters):
        asked.append(parameters.clone())
        return torch.zeros_like(parameters)

    theta = torch.tensor([1.0, 2.0])
    SGD().step(theta, gradient, {}, StepSettings(torch.zeros(2), 0.1))
    assert len(asked) == 1
    assert torch.equal(asked[0], theta)
