from __future__ import annotations

import math

import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.local_steps import INDEX, SGD, StepSettings

FedSAM = INDEX["fedsam"]

G = torch.Generator().manual_seed(0)
START = torch.randn(7, generator=G, dtype=torch.float64)


def gradient(parameters):
    return 4 * parameters**3


def test_one_step_worked_out_by_hand():
    # theta (3, 4), gradient theta, norm 5, rho 0.5: the gradient is taken at theta + (0.3, 0.4); lr 0.1.
    theta = torch.tensor([3.0, 4.0], dtype=torch.float64)
    after, _ = FedSAM(rho=0.5).step(theta, lambda at: at, torch.zeros_like(theta), StepSettings(theta, 0.1))
    torch.testing.assert_close(after, theta - 0.1 * torch.tensor([3.3, 4.4], dtype=torch.float64), rtol=0, atol=1e-7)


def test_it_is_torch_optim_sgd_on_the_perturbed_gradient():
    settings = StepSettings(START, lr=0.003, momentum=0.9, weight_decay=0.01)
    theirs = START.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.003, momentum=0.9, weight_decay=0.01)
    ours, carried = START, FedSAM(rho=0.2).init(settings)
    for _ in range(10):
        at = theirs.detach()
        uphill = gradient(at)
        theirs.grad = gradient(at + 0.2 * uphill / (math.sqrt(sum(value**2 for value in uphill.tolist())) + 1e-7))
        optimizer.step()
        ours, carried = FedSAM(rho=0.2).step(ours, gradient, carried, settings)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_rho_zero_is_plain_sgd_and_weight_decay_acts_on_the_unperturbed_parameters():
    settings = StepSettings(START, lr=0.01, momentum=0.9, weight_decay=0.1)
    carried = {"momentum": torch.zeros_like(START)}
    plain = SGD().step(START, gradient, carried, settings)
    torch.testing.assert_close(FedSAM(rho=0.0).step(START, gradient, carried, settings), plain)
    flat = FedSAM(rho=0.5).step(START, lambda at: torch.ones_like(at), carried, settings)
    torch.testing.assert_close(flat, SGD().step(START, lambda at: torch.ones_like(at), carried, settings))


def test_where_the_gradient_is_zero_it_stays():
    after, _ = FedSAM().step(START, torch.zeros_like, torch.zeros_like(START), StepSettings(START, 0.1))
    assert torch.equal(after, START)


@pytest.mark.parametrize("rho", [-0.1, math.nan, math.inf])
def test_a_senseless_rho_is_refused_by_name(rho):
    with pytest.raises(ArgumentError, match=r"^rho: input should be (greater than or equal to 0|a finite number)"):
        FedSAM(rho=rho)
