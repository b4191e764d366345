from __future__ import annotations

import math

import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.local_steps import INDEX, SGD, StepSettings

FedProx = INDEX["fedprox"]

G = torch.Generator().manual_seed(0)
START = torch.randn(37, generator=G, dtype=torch.float64)
TARGET = torch.randn(37, generator=G, dtype=torch.float64)


def loss(parameters):
    return (parameters - TARGET).pow(4).sum()


def gradient(parameters):
    return torch.func.grad(loss)(parameters)


def test_it_is_torch_optim_sgd_on_the_loss_with_the_squared_proximal_term():
    settings = StepSettings(START, lr=0.003, momentum=0.9, weight_decay=0.01)
    theirs = START.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.003, momentum=0.9, weight_decay=0.01)
    ours, carried = START, FedProx(mu=0.7).init(settings)
    for _ in range(10):
        optimizer.zero_grad()
        (loss(theirs) + 0.7 / 2 * (theirs - START).square().sum()).backward()
        optimizer.step()
        ours, carried = FedProx(mu=0.7).step(ours, gradient, carried, settings)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_one_step_worked_out_by_hand():
    # theta 3, sent 1, gradient 5, mu 0.5, lr 0.1: theta - 0.1 (5 + 0.5 * 2) = 2.4.
    theta = torch.tensor([3.0])
    after, _ = FedProx(mu=0.5).step(
        theta, lambda _: torch.tensor([5.0]), torch.zeros(1), StepSettings(torch.tensor([1.0]), 0.1)
    )
    assert after.item() == pytest.approx(2.4, abs=1e-6)


def test_the_first_step_and_mu_zero_are_plain_sgd_to_the_bit():
    settings = StepSettings(START, lr=0.01, momentum=0.9)
    carried = {"momentum": torch.zeros_like(START)}
    assert torch.equal(
        FedProx(mu=9.0).step(START, gradient, carried, settings)[0], SGD().step(START, gradient, carried, settings)[0]
    )
    moved = START + 1
    assert torch.equal(
        FedProx(mu=0.0).step(moved, gradient, carried, settings)[0], SGD().step(moved, gradient, carried, settings)[0]
    )


def test_the_larger_mu_the_closer_it_stays():
    def distance(mu):
        theta, carried = START, {"momentum": torch.zeros_like(START)}
        for _ in range(50):
            theta, carried = FedProx(mu).step(theta, gradient, carried, StepSettings(START, lr=0.003))
        return (theta - START).norm()

    assert distance(0.0) > distance(1.0) > distance(10.0) > 0


@pytest.mark.parametrize("mu", [-0.1, math.nan, math.inf])
def test_a_senseless_mu_is_refused_by_name(mu):
    with pytest.raises(ArgumentError, match=r"^mu: input should be (greater than or equal to 0|a finite number)"):
        FedProx(mu=mu)
