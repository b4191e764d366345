from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.server_updates import INDEX, fednova, fednova_normaliser
from updating import moved

FedNova = INDEX["fednova"]

quick = settings(deadline=None, derandomize=True, max_examples=60)
RNG = np.random.default_rng(1)
UPDATES = RNG.normal(size=(3, 9))
STEPS = np.array([2, 5, 11])
WEIGHTS = np.array([0.5, 0.2, 0.3])


def by_recursion(steps, momentum):
    """The authors' loop: a counter goes through the momentum, and is summed."""
    counter = total = 0.0
    for _ in range(steps):
        counter = momentum * counter + 1
        total += counter
    return total


@quick
@given(st.integers(0, 400), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99]))
def test_the_normaliser_is_the_authors_recursion(steps, momentum):
    assert fednova_normaliser(steps, momentum) == pytest.approx(by_recursion(steps, momentum), rel=1e-9)


def test_normalisers_worked_out_by_hand():
    assert fednova_normaliser(7, 0.0) == 7
    assert fednova_normaliser(1, 0.9) == pytest.approx(1)
    assert fednova_normaliser(3, 0.5) == pytest.approx(1 + 1.5 + 1.75)
    assert fednova_normaliser(0, 0.9) == 0


def test_the_normaliser_is_what_a_constant_gradient_adds_up_to_in_pytorch_s_sgd():
    theta = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=1.0, momentum=0.9)
    for _ in range(12):
        theta.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert fednova_normaliser(12, 0.9) == pytest.approx(-theta.item())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_formula(momentum):
    a = [by_recursion(steps, momentum) for steps in (2, 5, 11)]
    tau_eff = 0.5 * a[0] + 0.2 * a[1] + 0.3 * a[2]
    change = tau_eff * (0.5 * UPDATES[0] / a[0] + 0.2 * UPDATES[1] / a[1] + 0.3 * UPDATES[2] / a[2])
    np.testing.assert_allclose(fednova(UPDATES, STEPS, WEIGHTS, momentum), change, rtol=1e-12)
    model = torch.tensor(RNG.normal(size=9))
    after, state = moved(FedNova(momentum), {}, model, torch.tensor(UPDATES), WEIGHTS, STEPS)
    np.testing.assert_allclose(after.numpy(), model.numpy() + change, rtol=1e-12)
    assert state == FedNova(momentum).init(model) == {}


def test_two_clients_worked_out_by_hand():
    # Steps 1 and 3, no momentum, weights 1/2: tau_eff 2, so effective weights 1/2 * 2 / 1 = 1 and 1/2 * 2 / 3 = 1/3.
    np.testing.assert_allclose(fednova(np.eye(2), [1, 3], [0.5, 0.5], 0.0), [1, 1 / 3])
    np.testing.assert_allclose(fednova(np.array([[1.0], [6.0]]), [1, 3], [0.5, 0.5], 0.0), [3.0])


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.sampled_from([0.0, 0.9]), st.integers(0, 1000))
def test_the_effective_weights_sum_to_one_or_more(steps, momentum, seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(steps)))
    assert fednova(np.eye(len(steps)), steps, weights, momentum).sum() >= 1 - 1e-12


def test_a_client_that_took_no_step_has_no_say():
    # tau_eff is 1/2 * 0 + 1/2 * 4 = 2, so the other's effective weight is 1/2 * 2 / 4.
    np.testing.assert_allclose(fednova(np.eye(2), [0, 4], [0.5, 0.5], 0.0), [0.0, 0.25])
    assert (fednova(UPDATES * 0, [0, 0, 0], WEIGHTS, 0.9) == 0).all()


def test_a_tensor_gives_a_tensor_of_its_dtype_and_an_array_an_array():
    as_array = fednova(UPDATES, STEPS, WEIGHTS, 0.9)
    as_tensor = fednova(torch.tensor(UPDATES, dtype=torch.float32), STEPS, WEIGHTS, 0.9)
    assert isinstance(as_array, np.ndarray)
    assert as_tensor.dtype == torch.float32
    np.testing.assert_allclose(as_tensor.numpy(), as_array, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((UPDATES, [1, 2], WEIGHTS, 0.9), r"^steps: expected shape \(3,\)"),
        ((UPDATES, [1, 2, -1], WEIGHTS, 0.9), r"^steps: must be whole numbers, 0 or above, got -1"),
        ((UPDATES, [1, 2, 1.5], WEIGHTS, 0.9), r"^steps: must be whole numbers, 0 or above, got 1.5"),
        ((UPDATES, [1, 2, math.nan], WEIGHTS, 0.9), r"^steps: must be whole numbers, 0 or above, got nan"),
        ((UPDATES, STEPS, [0.5, 0.5, -1], 0.9), r"^weights: expected .* not negative"),
        ((UPDATES, STEPS, [0.5, 0.5, math.nan], 0.9), r"^weights: expected .* finite"),
        ((UPDATES[:0], [], [], 0.9), r"^weights: expected at least one"),
        ((UPDATES[:2], STEPS, WEIGHTS, 0.9), r"^weights: expected shape \(2,\)"),
        ((UPDATES[0], STEPS, WEIGHTS, 0.9), r"^updates: expected a float tensor of shape"),
        ((UPDATES * math.nan, STEPS, WEIGHTS, 0.9), r"^updates: must be finite"),
        ((UPDATES, STEPS, WEIGHTS, 1.0), r"^momentum: must be in \[0, 1\), got 1.0"),
    ],
)
def test_senseless_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        fednova(*arguments)
