from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedskew.models import Outputs
from fedskew.objectives import MOON, Batch, Context
from fedskew.objectives.functional import moon

RNG = np.random.default_rng(2)
Z, SENT, PREVIOUS = (torch.tensor(RNG.normal(size=(6, 4))) for _ in range(3))


@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_the_formula(temperature):
    total = 0.0
    for z, sent, previous in zip(Z, SENT, PREVIOUS, strict=True):
        near = math.exp(F.cosine_similarity(z, sent, dim=0).item() / temperature)
        far = math.exp(F.cosine_similarity(z, previous, dim=0).item() / temperature)
        total -= math.log(near / (near + far))
    assert moon(Z, SENT, PREVIOUS, temperature).item() == pytest.approx(total / 6, abs=1e-9)


def test_equal_models_cost_ln_2_and_lengths_mean_nothing():
    assert moon(Z, SENT, SENT).item() == pytest.approx(math.log(2), abs=1e-12)
    torch.testing.assert_close(moon(3 * Z, 0.1 * SENT, 9 * PREVIOUS), moon(Z, SENT, PREVIOUS))


def test_a_zero_representation_has_cosine_0_and_a_finite_gradient():
    z = torch.zeros(2, 3, requires_grad=True)
    value = moon(z, torch.ones(2, 3), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    value.backward()
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)
    assert z.grad.abs().max() < 10


def test_a_small_temperature_does_not_overflow():
    assert moon(Z.float(), -Z.float(), Z.float(), temperature=1e-3).item() == pytest.approx(2000, rel=1e-5)


def batch(features: torch.Tensor) -> Batch:
    return Batch(features, torch.zeros(len(features), 3), torch.zeros(len(features), dtype=torch.int64))


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_without_a_previous_model_it_is_exactly_0_and_moves_nothing(bad):
    z = (Z + bad).requires_grad_()
    value = MOON().value(batch(z), Context(torch.ones(3), teacher=Outputs(SENT, SENT)))
    value.backward()
    assert value == 0
    assert (z.grad == 0).all()
