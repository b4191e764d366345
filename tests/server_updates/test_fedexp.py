from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import fedskew
from fedskew.errors import ArgumentError
from fedskew.server_updates import INDEX, fedexp_step
from updating import moved

FedEXP = INDEX["fedexp"]

quick = settings(deadline=None, derandomize=True, max_examples=60)
RNG = np.random.default_rng(1)
UPDATES = RNG.normal(size=(4, 9))
WEIGHTS = np.array([0.4, 0.1, 0.2, 0.3])


def test_orthogonal_updates_worked_out_by_hand():
    # Four orthogonal unit updates, equal weights: mean of squares 1, square of the mean 1/4. With eps 1/4: 1 / 1.
    assert fedexp_step(np.eye(4), np.full(4, 0.25), 0.25) == 1
    assert fedexp_step(np.eye(4), np.full(4, 0.25), 0.0) == pytest.approx(2)


def test_the_formula():
    squares = sum(p * sum(value**2 for value in row) for p, row in zip(WEIGHTS, UPDATES, strict=True))
    mean = [sum(p * row[i] for p, row in zip(WEIGHTS, UPDATES, strict=True)) for i in range(9)]
    eta = max(1.0, squares / (2 * (sum(value**2 for value in mean) + 0.01)))
    assert eta > 1
    assert fedexp_step(UPDATES, WEIGHTS, 0.01) == pytest.approx(eta, rel=1e-12)
    assert fedexp_step(torch.tensor(UPDATES), WEIGHTS, 0.01) == pytest.approx(eta, rel=1e-12)
    model = torch.tensor(RNG.normal(size=9))
    after, state = moved(FedEXP(eps=0.01), {}, model, torch.tensor(UPDATES), WEIGHTS, np.ones(4, dtype=np.int64))
    np.testing.assert_allclose(after.numpy(), model.numpy() + eta * np.array(mean), rtol=1e-12)
    assert state == FedEXP().init(model) == {}


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_where_nobody_moved_the_step_is_1_and_the_model_stays(eps):
    assert fedexp_step(np.zeros((3, 5)), np.full(3, 1 / 3), eps) == 1
    model = torch.ones(5)
    after, _ = moved(FedEXP(eps), {}, model, torch.zeros(3, 5), np.full(3, 1 / 3), np.ones(3, dtype=np.int64))
    assert torch.equal(after, model)


@quick
@given(st.integers(1, 8), st.integers(0, 1000), st.floats(0, 10))
def test_it_never_shrinks_the_update_and_falls_with_eps(clients, seed, eps):
    rng = np.random.default_rng(seed)
    updates, weights = rng.normal(size=(clients, 6)), rng.dirichlet(np.ones(clients))
    assert fedexp_step(updates, weights, eps) >= fedexp_step(updates, weights, eps + 1) >= 1


@quick
@given(st.integers(1, 5), st.integers(0, 1000), st.floats(1e-3, 1e3))
def test_without_eps_the_scale_of_the_updates_means_nothing(clients, seed, scale):
    rng = np.random.default_rng(seed)
    updates, weights = rng.normal(size=(clients, 6)), rng.dirichlet(np.ones(clients))
    assert fedexp_step(scale * updates, weights, 0) == pytest.approx(fedexp_step(updates, weights, 0), rel=1e-9)


def test_the_step_does_not_depend_on_threads_and_keeps_its_digits_over_many_parameters():
    updates = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0))
    weights = np.full(3, 1 / 3)
    threads = torch.get_num_threads()
    try:
        steps = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            steps.add(fedexp_step(updates, weights, 1e-3))
    finally:
        torch.set_num_threads(threads)
    exact = [math.fsum(value**2 for value in row) for row in updates.tolist()]
    mean = math.fsum(value**2 for value in updates.double().mean(dim=0).tolist())
    assert len(steps) == 1
    assert steps.pop() == pytest.approx(math.fsum(exact) / 3 / (2 * (mean + 1e-3)), rel=1e-12)


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_a_senseless_eps_is_refused_by_name(eps):
    with pytest.raises(ArgumentError, match=r"^eps: must be 0 or above"):
        fedexp_step(UPDATES, WEIGHTS, eps)


def test_arguments_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ArgumentError, match=r"^weights: expected shape \(4,\)"):
        fedexp_step(UPDATES, WEIGHTS[:3], 0.1)
    with pytest.raises(ArgumentError, match=r"^updates: must be finite"):
        fedexp_step(UPDATES * math.inf, WEIGHTS, 0.1)


def test_the_average_of_the_last_two_models_is_evaluated_and_training_goes_on_from_the_last():
    update, models = FedEXP(average_last_two=True), [torch.tensor([float(value), 1.0]) for value in (2, 4, 10)]
    state = update.init(models[0])
    assert update.evaluated(state, models[0]).tolist() == [2, 1]
    for old, new, mean in ((models[0], models[1], 3), (models[1], models[2], 7)):
        after, state = moved(update, state, old, (new - old)[None], np.ones(1), [1])
        assert torch.equal(after, new)
        assert update.evaluated(state, new).tolist() == [mean, 1]


def test_a_run_saves_the_average_and_trains_as_without_it(tmp_path):
    task = {
        "data": "digits",
        "partition": {"rule": "dirichlet_by_class", "clients": 5, "beta": 0.5, "min_size": 1},
        "model": "logistic",
        "training": {"rounds": 3, "batch_size": 64},
    }
    last = [fedskew.simulate(task, method="fedexp", training={**task["training"], "rounds": n}) for n in (2, 3)]
    averaged = fedskew.simulate(
        task, method={"preset": "fedexp", "server_update": {"average_last_two": True}}, out=tmp_path
    )
    saved = load_file(averaged.folder / "model.safetensors")
    for name, value in averaged.model.state_dict().items():
        assert torch.equal(saved[name], value)
        torch.testing.assert_close(value, (last[0].model.state_dict()[name] + last[1].model.state_dict()[name]) / 2)
    assert [record["loss"] for record in averaged.rounds] == [record["loss"] for record in last[1].rounds]
    assert averaged.rounds[-1]["evaluation"] != last[1].rounds[-1]["evaluation"]
