from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedskew.errors import ArgumentError
from fedskew.server_updates import Plain, weighted_sum
from updating import moved

quick = settings(deadline=None, derandomize=True, max_examples=40)


def federation(clients=4, parameters=50, seed=0, dtype=torch.float32):
    rng = np.random.default_rng(seed)
    model = torch.tensor(rng.normal(size=parameters), dtype=dtype)
    updates = torch.tensor(rng.normal(scale=0.1, size=(clients, parameters)), dtype=dtype)
    weights = rng.dirichlet(np.ones(clients))
    return model, updates, weights, np.full(clients, 5)


def step(component, model, updates, weights, steps):
    return moved(component, component.init(model), model, updates, weights, steps)[0]


def test_fedavg_worked_out_by_hand():
    model = torch.tensor([1.0, 2.0])
    updates = torch.tensor([[4.0, 0.0], [0.0, -8.0]])
    after = step(Plain(), model, updates, np.array([0.25, 0.75]), np.array([1, 1]))
    assert after.tolist() == [2.0, -4.0]


def test_it_is_the_weighted_mean_of_the_clients_models():
    model, updates, weights, steps = federation(dtype=torch.float64)
    mean = weights @ (model + updates).numpy()
    np.testing.assert_allclose(step(Plain(), model, updates, weights, steps).numpy(), mean, rtol=1e-13, atol=1e-14)


def test_momentum_worked_out_by_hand():
    # lr 2, momentum 0.5, mean updates 1 then 3: v = 1, then 0.5 + 3 = 3.5; model 0, then 2, then 9.
    component = Plain(lr=2.0, momentum=0.5)
    model, one, steps = torch.zeros(1), np.ones(1), np.ones(1, dtype=np.int64)
    state = component.init(model)
    model, state = moved(component, state, model, torch.tensor([[1.0]]), one, steps)
    assert model.item() == 2
    model, state = moved(component, state, model, torch.tensor([[3.0]]), one, steps)
    assert model.item() == 9
    assert state["velocity"].item() == 3.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_depend_neither_on_layout_nor_on_threads(dtype):
    # 70,001 parameters: above the size from which PyTorch splits an operation among threads.
    model, updates, weights, steps = federation(clients=7, parameters=70_001, dtype=dtype)
    expected = step(Plain(lr=0.7), model, updates, weights, steps)
    column_major = updates.T.contiguous().T
    every_second = torch.stack([updates, -updates], dim=2)[:, :, 0]
    assert torch.equal(step(Plain(lr=0.7), model, column_major, weights, steps), expected)
    assert torch.equal(step(Plain(lr=0.7), model, every_second, weights, steps), expected)
    parts = [step(Plain(lr=0.7), model[at], updates[:, at], weights, steps) for at in (slice(13), slice(13, None))]
    assert torch.equal(torch.cat(parts), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(step(Plain(lr=0.7), model, updates, weights, steps), expected)
    finally:
        torch.set_num_threads(threads)


@quick
@given(st.integers(1, 6), st.integers(0, 100))
def test_one_client_with_all_the_weight_is_the_next_model(clients, seed):
    model, updates, _, steps = federation(clients, seed=seed, dtype=torch.float64)
    weights = np.zeros(clients)
    weights[seed % clients] = 1.0
    after = step(Plain(), model, updates, weights, steps)
    torch.testing.assert_close(after, model + updates[seed % clients], rtol=0, atol=1e-15)


@quick
@given(st.integers(1, 6), st.integers(0, 100), st.floats(0.01, 3))
def test_the_order_of_clients_matters_to_rounding_only_and_the_server_rate_scales_the_change(clients, seed, lr):
    model, updates, weights, steps = federation(clients, seed=seed, dtype=torch.float64)
    order = np.random.default_rng(seed).permutation(clients)
    change = step(Plain(), model, updates, weights, steps) - model
    turned = step(Plain(lr), model, updates[order], weights[order], steps) - model
    torch.testing.assert_close(turned, lr * change, rtol=0, atol=1e-14)


def test_a_float32_model_is_rounded_once():
    # A thousand updates of 2^-24 of the model: added one by one in float32 they would all be lost.
    model = torch.ones(1)
    after = step(
        Plain(), model, torch.full((1000, 1), 1000 * 2.0**-24), np.full(1000, 1e-3), np.ones(1000, dtype=np.int64)
    )
    assert after.item() == pytest.approx(1 + 1000 * 2.0**-24, abs=2.0**-24)


def test_updates_and_weights_that_do_not_fit_are_refused_by_name():
    _, updates, weights, _ = federation()
    with pytest.raises(ArgumentError, match=r"^weights: expected shape \(4,\), one for each update, got \(3,\)"):
        weighted_sum(updates, weights[:3])
    with pytest.raises(ArgumentError, match=r"^updates: expected a float tensor of shape \(answered, parameters\)"):
        weighted_sum(updates[0], weights)
