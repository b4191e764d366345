"""Every local step: a pure function of flat vectors, the same for one client and for a mapped cohort."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fedskew.errors import ArgumentError
from fedskew.hooks import Hooks
from fedskew.local_steps import INDEX, SGD, StepSettings

G = torch.Generator().manual_seed(0)
START = torch.randn(6, generator=G, dtype=torch.float64)
CURVATURE = torch.rand(6, generator=G, dtype=torch.float64)
OPTIMUM = torch.randn(6, generator=G, dtype=torch.float64)

every_step = pytest.mark.parametrize("step", [kind() for kind in INDEX.values()], ids=INDEX.keys())


def gradient(parameters):
    return CURVATURE * (parameters - OPTIMUM)


def settings(step, start=START, lr=0.1, momentum=0.9, weight_decay=0.01):
    """Those of a first round."""
    if not isinstance(step, Hooks):
        return StepSettings(start, lr, momentum, weight_decay)
    broadcast = step.broadcast(step.init_server(START, 3))
    return StepSettings(start, lr, momentum, weight_decay, broadcast, step.init_client(START))


def run(step, start, settings, steps=5):
    parameters, carried = start, step.init(settings)
    for _ in range(steps):
        parameters, carried = step.step(parameters, gradient, carried, settings)
    return parameters


@every_step
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_no_argument_is_written_to_and_the_result_is_its_own_memory(step, momentum, weight_decay):
    parameters, buffer, start = START + 1, torch.ones_like(START), START.clone()
    given = CURVATURE.clone()
    after, _ = step.step(
        parameters,
        lambda _: given,
        {"momentum": buffer},
        settings(step, start, momentum=momentum, weight_decay=weight_decay),
    )
    assert torch.equal(parameters, START + 1)
    assert torch.equal(buffer, torch.ones_like(START))
    assert torch.equal(given, CURVATURE)
    assert torch.equal(start, START)
    assert after.data_ptr() not in {parameters.data_ptr(), given.data_ptr(), buffer.data_ptr(), start.data_ptr()}
    assert after.dtype == START.dtype


@every_step
def test_mapped_over_a_cohort_it_equals_one_client_after_another(step):
    cohort = torch.stack([START, START + 1, START - 2])
    mapped = torch.func.vmap(lambda start: run(step, start, settings(step)))(cohort)
    looped = torch.stack([run(step, start, settings(step)) for start in cohort])
    torch.testing.assert_close(mapped, looped)


@every_step
def test_a_cohort_that_starts_from_one_sent_model_is_mapped_over_its_data_alone(step):
    optima = torch.stack([OPTIMUM, OPTIMUM + 1, -OPTIMUM])

    def train(optimum):
        parameters, carried = START, step.init(settings(step))
        for _ in range(3):
            parameters, carried = step.step(parameters, lambda at: CURVATURE * (at - optimum), carried, settings(step))
        return parameters

    torch.testing.assert_close(torch.func.vmap(train)(optima), torch.stack([train(optimum) for optimum in optima]))


@every_step
def test_it_descends(step):
    plain = settings(step, momentum=0.5, weight_decay=0.0)
    before, after = (START - OPTIMUM).norm(), (run(step, START, plain, steps=200) - OPTIMUM).norm()
    assert after < 0.2 * before


@every_step
def test_it_is_a_frozen_dataclass(step):
    assert dataclasses.is_dataclass(step)
    assert step == type(step)()


@every_step
def test_where_the_gradient_is_zero_it_stays(step):
    plain = settings(step, weight_decay=0.0)
    assert torch.equal(step.step(START, torch.zeros_like, step.init(plain), plain)[0], START)


FedProx, FedSAM, Scaffold = INDEX["fedprox"], INDEX["fedsam"], INDEX["scaffold"]


@pytest.mark.parametrize("step", [FedProx(mu=0.0), FedSAM(rho=0.0), Scaffold()], ids=repr)
def test_with_nothing_to_add_it_is_sgd_to_the_bit(step):
    own = settings(step)
    ours, carried, theirs, buffer = START, step.init(own), START, SGD().init(own)
    for _ in range(5):
        ours, carried = step.step(ours, lambda at: at**3, carried, own)
        theirs, buffer = SGD().step(theirs, lambda at: at**3, buffer, own)
        assert torch.equal(ours, theirs)


def pulled(at):
    """FedProx's gradient, mu 0.7."""
    return gradient(at) + 0.7 * (at - START)


def perturbed(at):
    """FedSAM's gradient, rho 0.2."""
    uphill = gradient(at)
    return gradient(at + 0.2 * uphill / (math.sqrt(sum(value**2 for value in uphill.tolist())) + 1e-7))


CHANGED = [(FedProx(mu=0.7), pulled), (FedSAM(rho=0.2), perturbed)]


@pytest.mark.parametrize(("step", "theirs"), CHANGED, ids=["fedprox", "fedsam"])
def test_it_is_torch_optim_sgd_on_another_gradient(step, theirs):
    expected, given = START.clone().requires_grad_(), settings(step, lr=0.03)
    optimiser = torch.optim.SGD([expected], lr=0.03, momentum=0.9, weight_decay=0.01)
    ours, carried = START, step.init(given)
    for _ in range(10):
        expected.grad = theirs(expected.detach())
        optimiser.step()
        ours, carried = step.step(ours, gradient, carried, given)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-12, atol=1e-12)


def test_fedprox_and_fedsam_worked_out_by_hand():
    # FedProx: theta 3, sent 1, gradient 5, mu 0.5, lr 0.1: theta - 0.1 (5 + 0.5 * 2) = 2.4.
    theta, sent = torch.tensor([3.0]), torch.tensor([1.0])
    after, _ = FedProx(mu=0.5).step(theta, lambda _: torch.tensor([5.0]), {}, StepSettings(sent, 0.1))
    assert after.item() == pytest.approx(2.4, abs=1e-6)
    # FedSAM: theta (3, 4), gradient theta, norm 5, rho 0.5: the gradient is taken at theta + (0.3, 0.4); lr 0.1.
    theta = torch.tensor([3.0, 4.0], dtype=torch.float64)
    after, _ = FedSAM(rho=0.5).step(theta, lambda at: at, {}, StepSettings(theta, 0.1))
    torch.testing.assert_close(after, theta - 0.1 * torch.tensor([3.3, 4.4], dtype=torch.float64), rtol=0, atol=1e-7)


def test_fedsams_weight_decay_acts_on_the_unperturbed_parameters():
    given = settings(FedSAM())
    ours, theirs = (step.step(START, torch.ones_like, step.init(given), given) for step in (FedSAM(rho=0.5), SGD()))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "key"),
    [("fedprox", "mu"), ("fedsam", "rho"), ("fedgf", "rho"), ("fedgf", "server_rho"), ("fedgf", "threshold")],
)
def test_a_senseless_number_is_refused_by_name(name, key, value):
    with pytest.raises(ArgumentError, match=rf"^{key}: input should be (greater than or equal to 0|a finite number)"):
        INDEX[name](**{key: value})


def test_senseless_options_are_refused_by_name():
    with pytest.raises(ArgumentError, match=r"^window: input should be greater than or equal to 1"):
        INDEX["fedgf"](window=0)
    with pytest.raises(ArgumentError, match=r"^option: input should be 'one' or 'two'"):
        Scaffold(option="three")
