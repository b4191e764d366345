from __future__ import annotations

import pytest
import torch

from fedskew.local_steps import SGD, StepSettings
from fedskew.models import Product


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
def test_in_place_it_is_the_same_to_the_bit_and_gradients_stay_as_they_are(momentum, weight_decay):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, 37, generator=generator)
    settings = StepSettings(start, 0.03, momentum, weight_decay)
    theirs, ours = start, start.clone()
    carried, own_carried = SGD().init(settings), SGD().init(settings)
    assert (carried is None) == (momentum == 0)
    for _ in range(3):
        # Two parameters that have one gradient between them, as those of a sum have.
        gradient = torch.randn(37, generator=generator)
        given = gradient.clone()
        both = gradient.expand(2, 37)
        theirs, carried = SGD().step(theirs, lambda _, both=both: both, carried, settings)
        SGD().step_in_place(list(ours), [given, given], [] if own_carried is None else list(own_carried), settings)
        assert torch.equal(ours, theirs)
        assert own_carried is carried is None or torch.equal(own_carried, carried)
        assert torch.equal(given, gradient)


def test_two_steps_worked_out_by_hand():
    # theta 1, gradient 2 theta, lr 0.1, momentum 0.5, weight decay 1.
    # d = 2 + 1 = 3, b = 3, theta = 0.7. Then d = 1.4 + 0.7 = 2.1, b = 0.5 * 3 + 2.1 = 3.6, theta = 0.7 - 0.36 = 0.34.
    theta = torch.ones(1, dtype=torch.float64)
    settings = StepSettings(theta, lr=0.1, momentum=0.5, weight_decay=1.0)
    carried = SGD().init(settings)
    theta, carried = SGD().step(theta, lambda at: 2 * at, carried, settings)
    theta, carried = SGD().step(theta, lambda at: 2 * at, carried, settings)
    assert theta.item() == pytest.approx(0.34, abs=1e-15)
    assert carried.item() == pytest.approx(3.6, abs=1e-15)


def test_the_gradient_is_asked_for_once_and_at_the_present_parameters():
    asked = []

    def gradient(parameters):
        asked.append(parameters.clone())
        return torch.zeros_like(parameters)

    theta = torch.tensor([1.0, 2.0])
    SGD().step(theta, gradient, None, StepSettings(torch.zeros(2), 0.1))
    assert len(asked) == 1
    assert torch.equal(asked[0], theta)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_along_products_it_is_torch_optim_sgd(momentum, weight_decay):
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    bias = torch.randn(5, generator=generator, dtype=torch.float64)
    theirs = [ours.clone().requires_grad_(), bias.clone().requires_grad_()]
    optimizer = torch.optim.SGD(theirs, lr=0.03, momentum=momentum, weight_decay=weight_decay)
    settings = StepSettings(torch.zeros(40), 0.03, momentum, weight_decay)
    carried = [torch.zeros_like(ours), torch.zeros_like(bias)] if momentum else []
    for _ in range(4):
        left, right = (torch.randn(3, width, generator=generator, dtype=torch.float64) for width in (5, 7))
        theirs[0].grad, theirs[1].grad = left.t() @ right, left.sum(0)
        optimizer.step()
        SGD().step_in_place([ours, bias], [Product(left, right), left.sum(0)], carried, settings)
    torch.testing.assert_close([ours, bias], [one.detach() for one in theirs], rtol=1e-13, atol=1e-13)


def test_a_layer_without_bias_is_all_there_is():
    weight = torch.ones(1, 1)
    SGD().step_in_place([weight], [Product(torch.full((2, 1), 3.0), torch.ones(2, 1))], [], StepSettings(weight, 0.5))
    assert weight.item() == 1 - 0.5 * 6
