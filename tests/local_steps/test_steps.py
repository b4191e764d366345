"""Every local step: a pure function of flat vectors, the same for one client and for a mapped cohort."""

import dataclasses
import math

import pytest
import torch

from fedskew.errors import ComponentError
from fedskew.hooks import Hooks
from fedskew.local_steps import INDEX, SGD, Adam, Correction, StepSettings, corrected, steps_in_place

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


@every_step
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_no_argument_is_written_to_and_the_result_is_its_own_memory(step, momentum, weight_decay):
    given = [START + 1, torch.ones_like(START), CURVATURE.clone(), START.clone()]
    copies = [part.clone() for part in given]
    parameters, buffer, slope, start = given
    own = settings(step, start, momentum=momentum, weight_decay=weight_decay)
    after, _ = step.step(parameters, lambda _: slope, {"momentum": buffer}, own)
    assert all(torch.equal(part, copied) for part, copied in zip(given, copies, strict=True))
    assert after.data_ptr() not in {part.data_ptr() for part in given}
    assert after.dtype == START.dtype


@every_step
def test_mapped_over_starts_and_over_data_it_equals_one_client_after_another(step):
    def train(start, optimum, own):
        parameters, carried = start, step.init(own)
        for _ in range(5):
            parameters, carried = step.step(parameters, lambda at: CURVATURE * (at - optimum), carried, own)
        return parameters

    starts, optima, sent = torch.stack([START, START + 1, START - 2]), torch.stack([OPTIMUM] * 3), settings(step)
    for of, rows in (
        (lambda start: train(start, OPTIMUM, settings(step, start)), starts),
        (lambda optimum: train(START, optimum, sent), optima + torch.arange(3)[:, None]),
    ):
        torch.testing.assert_close(torch.func.vmap(of)(rows), torch.stack([of(row) for row in rows]))


@every_step
def test_it_is_a_frozen_dataclass_that_descends_and_stays_where_the_gradient_is_zero(step):
    assert dataclasses.is_dataclass(step)
    assert step == type(step)()
    plain = settings(step, momentum=0.5, weight_decay=0.0)
    parameters, carried = START, step.init(plain)
    assert torch.equal(step.step(START, torch.zeros_like, carried, plain)[0], START)
    for _ in range(200):
        parameters, carried = step.step(parameters, gradient, carried, plain)
    assert (parameters - OPTIMUM).norm() < 0.2 * (START - OPTIMUM).norm()


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


# SGD itself.


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torch_optim_sgd_to_the_bit(momentum, weight_decay, dtype):
    # Length 37: the vectorised part of an operation and its remainder.
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(37, generator=generator, dtype=dtype)
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=0.03, momentum=momentum, weight_decay=weight_decay, foreach=False)
    given = StepSettings(start, 0.03, momentum, weight_decay)
    ours, carried = start, SGD().init(given)
    for slope in torch.randn(10, 37, generator=generator, dtype=dtype):
        theirs.grad = slope.clone()
        optimizer.step()
        ours, carried = SGD().step(ours, lambda _, slope=slope: slope, carried, given)
        assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize("name", ["sgd", "fedprox", "scaffold", "feddyn", "fedbabu"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_in_place_it_is_the_same_up_to_rounding(name, momentum, weight_decay):
    start, theirs, client, server, *slopes = torch.randn(7, 77, generator=torch.Generator().manual_seed(0))
    states = {"scaffold.server": server}, {"scaffold.client": client, "feddyn.drift": client}
    step, ours, given = INDEX[name](), theirs.clone(), StepSettings(start, 0.03, momentum, weight_decay, *states)
    carried, own_carried = step.init(given), step.init(given)
    assert (carried == {}) == (momentum == 0)
    assert steps_in_place(step) is step
    for slope in slopes:
        theirs, carried = step.step(theirs, lambda _, slope=slope: slope, carried, given)
        step.step_in_place(ours, lambda _, slope=slope: slope, own_carried, given)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        torch.testing.assert_close(own_carried, dict(carried), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "feddyn"])
@pytest.mark.parametrize("more", [{}, {"adam": Adam()}, {"clip_norm": 0.5}], ids=["sgd", "adam", "clipped"])
def test_with_its_correction_computed_once_a_step_is_the_same_up_to_rounding(name, more):
    start, parameters, client, server, slope = torch.randn(5, 77, generator=torch.Generator().manual_seed(1))
    states = {"scaffold.server": server}, {"scaffold.client": client, "feddyn.drift": client}
    step, given = INDEX[name](), StepSettings(start, 0.3, 0.9, 0.1, *states, **more)
    once, carried = corrected(step, given), step.init(given)
    theirs, _ = step.step(parameters, lambda _: slope, carried, given)
    ours, _ = step.step(parameters, lambda _: slope, carried, once)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    step.step_in_place(parameters, lambda _: slope, carried, once)
    torch.testing.assert_close(parameters, theirs, rtol=0, atol=1e-6)


def test_a_pull_is_decay_only_where_both_are_added_to_the_same_gradient():
    step, given = INDEX["fedprox"](0.5), StepSettings(START, 0.1, weight_decay=0.25)
    assert corrected(step, given)[3] == 0.75
    assert corrected(step, given).correction.pull == 0
    for own in ({"adam": Adam()}, {"clip_norm": 1.0}, {"rates": START}):
        assert corrected(step, given._replace(**own))[3] == 0.25
        assert corrected(step, given._replace(**own)).correction.pull == 0.5


@pytest.mark.parametrize("overridden", ["step", "step_in_place", "direction"])
def test_who_overrides_what_adds_a_correction_gets_none(overridden):
    kind = type("Own", (INDEX["fedprox"],), {overridden: lambda self, *of: START})
    given = StepSettings(START, 0.1)
    assert corrected(kind(), given) is given
    beside = type("Own", (kind,), {"correction": lambda self, settings: Correction(START)})
    assert corrected(beside(), given) is given


@pytest.mark.parametrize("name", ["fedprox", "feddyn"])
@pytest.mark.parametrize("once", [True, False])
def test_adam_makes_no_step_of_what_rounding_leaves_of_a_pull(name, once):
    start = torch.randn(77, generator=torch.Generator().manual_seed(1))
    step, given = INDEX[name](), StepSettings(start, 0.1, client={"feddyn.drift": torch.zeros(77)}, adam=Adam())
    settings = corrected(step, given) if once else given
    moved, _ = step.step(start, torch.zeros_like, step.init(given), settings)
    assert torch.equal(moved, start)


@pytest.mark.parametrize("wrong", [lambda slope: None, torch.sum, lambda slope: slope[:3], lambda slope: slope.half()])
def test_a_direction_that_is_no_number_for_each_parameter_is_refused(wrong):
    class Own(SGD):
        def direction(self, gradient, parameters, settings):
            return wrong(gradient)

    for step in (Own().step, Own().step_in_place):
        with pytest.raises(ComponentError, match=r"^Own: direction\(\) must return torch.float64 \(6,\)"):
            step(START.clone(), gradient, {}, StepSettings(START, 0.1))


def test_a_direction_that_does_not_lie_in_a_row_is_stepped_along():
    class Same(SGD):
        def direction(self, gradient, parameters, settings):
            return gradient.sum().expand(parameters.shape)

    start, settings = START.float(), StepSettings(START.float(), 0.1)
    ours = start.clone()
    Same().step_in_place(ours, torch.sin, {}, settings)
    torch.testing.assert_close(ours, start - 0.1 * start.sin().sum())


def test_two_steps_worked_out_by_hand():
    # theta 1, gradient 2 theta, lr 0.1, momentum 0.5, weight decay 1.
    # d = 2 + 1 = 3, b = 3, theta = 0.7. Then d = 1.4 + 0.7 = 2.1, b = 0.5 * 3 + 2.1 = 3.6, theta = 0.7 - 0.36 = 0.34.
    theta = torch.ones(1, dtype=torch.float64)
    given = StepSettings(theta, lr=0.1, momentum=0.5, weight_decay=1.0)
    carried = SGD().init(given)
    asked = []
    for _ in range(2):
        theta, carried = SGD().step(theta, lambda at: asked.append(at.item()) or 2 * at, carried, given)
    assert theta.item() == pytest.approx(0.34, abs=1e-15)
    assert carried["momentum"].item() == pytest.approx(3.6, abs=1e-15)
    assert asked == pytest.approx([1, 0.7])  # once a step, and at the present parameters
