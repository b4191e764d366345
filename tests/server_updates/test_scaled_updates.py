"""FedEXP's step and FedNova's normaliser: their formulas, by hand, and what they refuse."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import fedskew
from common import moved, normaliser, task
from fedskew.errors import ArgumentError
from fedskew.server_updates import INDEX, fedexp_step, fednova, fednova_normaliser

FedEXP, FedNova = INDEX["fedexp"], INDEX["fednova"]

quick = settings(deadline=None, derandomize=True, max_examples=60)
RNG = np.random.default_rng(1)
UPDATES, WEIGHTS, STEPS = RNG.normal(size=(3, 9)), np.array([0.5, 0.2, 0.3]), np.array([2, 5, 11])
MODEL = torch.tensor(RNG.normal(size=9))


def test_fedexps_step_by_its_formula_and_by_hand():
    # Four orthogonal unit updates, equal weights: mean of squares 1, square of the mean 1/4. With eps 1/4: 1 / 1.
    assert fedexp_step(np.eye(4), np.full(4, 0.25), 0.25) == 1
    assert fedexp_step(np.eye(4), np.full(4, 0.25), 0.0) == pytest.approx(2)
    assert fedexp_step(np.eye(4), np.full(4, 0.25), 9.0) == 1  # it never shrinks the update
    mean = WEIGHTS @ UPDATES
    eta = max(1.0, WEIGHTS @ (UPDATES**2).sum(axis=1) / (2 * (mean @ mean + 0.01)))
    assert eta > 1
    for updates in (UPDATES, torch.tensor(UPDATES)):
        assert fedexp_step(updates, WEIGHTS, 0.01) == pytest.approx(eta, rel=1e-12)
    after, state = moved(FedEXP(eps=0.01), {}, MODEL, torch.tensor(UPDATES), WEIGHTS, STEPS)
    np.testing.assert_allclose(after.numpy(), MODEL.numpy() + eta * mean, rtol=1e-12)
    assert state == FedEXP().init(MODEL) == {}


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_where_nobody_moved_the_step_is_1_and_the_model_stays(eps):
    assert fedexp_step(0 * UPDATES, WEIGHTS, eps) == 1
    after, _ = moved(FedEXP(eps), {}, MODEL, torch.zeros(3, 9), WEIGHTS, STEPS)
    assert torch.equal(after, MODEL)


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


def test_the_average_of_the_last_two_models_is_evaluated_and_training_goes_on_from_the_last():
    update, models = FedEXP(average_last_two=True), [torch.tensor([float(value), 1.0]) for value in (2, 4, 10)]
    state = update.init(models[0])
    assert update.evaluated(state, models[0]).tolist() == [2, 1]
    for old, new, mean in ((models[0], models[1], 3), (models[1], models[2], 7)):
        after, state = moved(update, state, old, (new - old)[None], np.ones(1), [1])
        assert torch.equal(after, new)
        assert update.evaluated(state, new).tolist() == [mean, 1]


def test_a_run_saves_the_average_and_trains_as_without_it(tmp_path):
    tree = task(5, beta=0.5, rounds=3, batch_size=64)
    method = {"preset": "fedexp", "server_update": {"average_last_two": True}}
    last = [fedskew.simulate(tree, method="fedexp", training={**tree["training"], "rounds": n}) for n in (2, 3)]
    averaged = fedskew.simulate(tree, method=method, out=tmp_path)
    state, (one, other) = dict(averaged.model.state_dict()), (run.model.state_dict() for run in last)
    torch.testing.assert_close(load_file(averaged.folder / "model.safetensors"), state, rtol=0, atol=0)
    torch.testing.assert_close(state, {name: (value + other[name]) / 2 for name, value in one.items()})
    assert [record["loss"] for record in averaged.rounds] == [record["loss"] for record in last[1].rounds]
    assert averaged.rounds[-1]["evaluation"] != last[1].rounds[-1]["evaluation"]


# FedNova.


@quick
@given(st.integers(0, 400), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99]))
def test_the_normaliser_is_the_authors_recursion(steps, momentum):
    assert fednova_normaliser(steps, momentum) == pytest.approx(normaliser(steps, momentum), rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_by_its_formula(momentum):
    a = np.array([normaliser(steps, momentum) for steps in STEPS])
    change = WEIGHTS @ a * ((WEIGHTS / a) @ UPDATES)
    np.testing.assert_allclose(fednova(UPDATES, STEPS, WEIGHTS, momentum), change, rtol=1e-12)
    after, state = moved(FedNova(momentum), {}, MODEL, torch.tensor(UPDATES), WEIGHTS, STEPS)
    np.testing.assert_allclose(after.numpy(), MODEL.numpy() + change, rtol=1e-12)
    assert state == FedNova(momentum).init(MODEL) == {}


def test_fednova_worked_out_by_hand():
    # Steps 1 and 3, no momentum, weights 1/2: tau_eff 2, so effective weights 1/2 * 2 / 1 = 1 and 1/2 * 2 / 3 = 1/3.
    half = [0.5, 0.5]
    np.testing.assert_allclose(fednova(np.eye(2), [1, 3], half, 0.0), [1, 1 / 3])
    np.testing.assert_allclose(fednova(np.array([[1.0], [6.0]]), [1, 3], half, 0.0), [3.0])
    # Who took no step has no say: tau_eff is 1/2 * 0 + 1/2 * 4 = 2, so the other's effective weight is 1/2 * 2 / 4.
    np.testing.assert_allclose(fednova(np.eye(2), [0, 4], half, 0.0), [0.0, 0.25])
    assert (fednova(UPDATES * 0, [0, 0, 0], WEIGHTS, 0.9) == 0).all()


def test_a_tensor_gives_a_tensor_of_its_dtype_and_an_array_an_array():
    as_array = fednova(UPDATES, STEPS, WEIGHTS, 0.9)
    as_tensor = fednova(torch.tensor(UPDATES, dtype=torch.float32), STEPS, WEIGHTS, 0.9)
    assert isinstance(as_array, np.ndarray)
    assert as_tensor.dtype == torch.float32
    np.testing.assert_allclose(as_tensor.numpy(), as_array, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (fednova, (UPDATES, [1, 2], WEIGHTS, 0.9), r"steps: expected shape \(3,\)"),
        (fednova, (UPDATES, [1, 2, -1], WEIGHTS, 0.9), "steps: must be whole numbers, 0 or above, got -1"),
        (fednova, (UPDATES, [1, 2, 1.5], WEIGHTS, 0.9), "steps: must be whole numbers, 0 or above, got 1.5"),
        (fednova, (UPDATES, [1, 2, math.nan], WEIGHTS, 0.9), "steps: must be whole numbers, 0 or above, got nan"),
        (fednova, (UPDATES, STEPS, [0, 1, -1], 0.9), "weights: every number must be finite and not negative"),
        (fednova, (UPDATES, STEPS, [0, 1, math.nan], 0.9), "weights: every number must be finite and not negative"),
        (fednova, (UPDATES[:0], [], [], 0.9), r"weights: must have the shape \(updates,\), not \(0,\)"),
        (fednova, (UPDATES[:2], STEPS, WEIGHTS, 0.9), r"weights: expected shape \(2,\)"),
        (fednova, (UPDATES[0], STEPS, WEIGHTS, 0.9), "updates: expected a float tensor of shape"),
        (fednova, (UPDATES * math.nan, STEPS, WEIGHTS, 0.9), "updates: must be finite"),
        (fednova, (UPDATES, STEPS, WEIGHTS, 1.0), r"momentum: must be in \[0, 1\), got 1.0"),
        (fedexp_step, (UPDATES, WEIGHTS, -1.0), "eps: input should be greater than or equal to 0 .got -1.0."),
        *((fedexp_step, (UPDATES, WEIGHTS, no), "eps: input should be a finite number") for no in (math.nan, math.inf)),
        (fedexp_step, (UPDATES, WEIGHTS[:2], 0.1), r"weights: expected shape \(3,\)"),
        (fedexp_step, (UPDATES * math.inf, WEIGHTS, 0.1), "updates: must be finite"),
    ],
)
def test_senseless_arguments_are_refused_by_name(function, arguments, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        function(*arguments)
