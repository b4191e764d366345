"""Every local step: a pure function of flat vectors, the same for one client and for a mapped cohort."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedskew.hooks import Hooks
from fedskew.local_steps import INDEX, StepSettings

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
