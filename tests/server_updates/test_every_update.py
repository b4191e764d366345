"""Every server update: a pure function, which is FedAvg where it has nothing to add; and each by hand."""

import math

import numpy as np
import pytest
import torch

import fedskew
from common import built, moved, task
from fedskew.components import with_clients
from fedskew.errors import ArgumentError
from fedskew.local_steps import INDEX as STEPS
from fedskew.server_updates import INDEX, Plain, weighted_sum

FedProx, FedACG = STEPS["fedprox"], INDEX["fedacg"]
FedAdagrad, FedAdam, FedYogi = (INDEX[name] for name in ("fedadagrad", "fedadam", "fedyogi"))

RNG = np.random.default_rng(0)
MODEL, UPDATES = torch.tensor(RNG.normal(size=9)), torch.tensor(RNG.normal(size=(3, 9)))
WEIGHTS, FOUR_STEPS = np.array([0.5, 0.2, 0.3]), np.full(3, 4)

OTHERS = [Plain(lr=0.3, momentum=0.9), FedAdam(corrected=True), FedYogi(initial=0.0)]
TOLD = {"fednova": {"local_momentum": 0.9}}
EVERY = [with_clients(kind(**TOLD.get(name, {})), 5) for name, kind in INDEX.items()] + OTHERS


@pytest.mark.parametrize("update", EVERY, ids=repr)
def test_no_argument_is_written_to_and_zeros_move_nothing(update):
    state = update.init(MODEL)
    still, _ = moved(update, state, MODEL, torch.zeros_like(UPDATES), WEIGHTS, FOUR_STEPS)
    assert torch.equal(still, MODEL)
    given = {**state, "model": MODEL, "updates": UPDATES}
    copies = {name: part.clone() for name, part in given.items()}
    after, _ = moved(update, state, MODEL, UPDATES, WEIGHTS, FOUR_STEPS)
    assert not torch.equal(after, MODEL)
    assert all(torch.equal(given[name], part) for name, part in copies.items())
    assert WEIGHTS.tolist() == [0.5, 0.2, 0.3]


ALIKE = UPDATES[:1].expand(3, -1)


@pytest.mark.parametrize(
    ("update", "updates"),
    [
        (INDEX["fedexp"](), ALIKE),
        (INDEX["fednova"](0.0), UPDATES),
        (INDEX["fednova"](0.9), UPDATES),
        (FedACG(momentum=0.0), UPDATES),
        (FedAdagrad(lr=1e9, tau=1e9, initial=0.0), UPDATES),
    ],
    ids=repr,
)
def test_where_it_has_nothing_to_add_it_is_fedavg(update, updates):
    ours, _ = moved(update, update.init(MODEL), MODEL, updates, WEIGHTS, FOUR_STEPS)
    theirs, _ = moved(Plain(), {}, MODEL, updates, WEIGHTS, FOUR_STEPS)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("update", [Plain(), INDEX["fedexp"](), INDEX["fednova"](0.9)], ids=repr)
def test_what_needs_no_state_has_none_and_is_evaluated_as_it_is(update):
    assert update.init(MODEL) == {}
    assert moved(update, {}, MODEL, UPDATES, WEIGHTS, FOUR_STEPS)[1] == {}
    assert getattr(update, "evaluated", lambda _, model: model)({}, MODEL) is MODEL


OF_ADAM = {"lr": 1.0, "momentum": 0.5, "decay": 0.75, "tau": 1.0, "initial": 0.0}
LAST = math.sqrt(13)


@pytest.mark.parametrize(
    ("update", "changes", "path"),
    [
        # lr 2, momentum 0.5, mean updates 1 then 3: v = 1, then 0.5 + 3 = 3.5.
        (Plain(lr=2.0, momentum=0.5), (1, 3), [2, 9]),
        # v = 9, then 25: 0.5 * 3 / (3 + 1), then 0.5 * 4 / (5 + 1) more.
        (FedAdagrad(lr=0.5, tau=1.0, initial=0.0), (3, 4), [3 / 8, 3 / 8 + 1 / 3]),
        # m = 1, v = 4 / 4; then m = 1/2 + D/2, v = 3/4 + 13/4 = 4.
        (FedAdam(**OF_ADAM), (2, LAST), [0.5, 0.5 + (0.5 + LAST / 2) / 3]),
        # Factors sqrt(1 - 0.75^2) / (1 - 0.5^2), then with cubes: the exponent is the round's number plus 1.
        (
            FedAdam(**OF_ADAM, corrected=True),
            (2, LAST),
            [math.sqrt(7) / 6, math.sqrt(7) / 6 + math.sqrt(37) / 8 / 0.875 * (0.5 + LAST / 2) / 3],
        ),
        # v: 0 + 4/4 = 1; D = 1 leaves it (sign 0); D = 1/2 takes 1/16 off.  m: 1, 1, 3/4.
        (FedYogi(**OF_ADAM), (2, 1, 0.5), [0.5, 1.0, 1.0 + 0.75 / (math.sqrt(15 / 16) + 1)]),
        # From v = tau^2, as in the paper, for D = tau and b1 = 0: lr tau / (sqrt(v) + tau).
        (FedAdagrad(lr=1.0, momentum=0.0, tau=0.5), (0.5,), [1 / (math.sqrt(2) + 1)]),
        (FedAdam(lr=1.0, momentum=0.0, tau=0.5), (0.5,), [1 / 2]),
        (FedYogi(lr=1.0, momentum=0.0, tau=0.5), (0.5,), [1 / 2]),
        # l = 1/2. D = 2 from 0: w = 2, m = 2, sent 3. D = 1 from 3: w = 4, m = 1 + 1 = 2, sent 5.
        (FedACG(momentum=0.5), (2, 1), [3, 5]),
    ],
    ids=repr,
)
def test_rounds_by_hand(update, changes, path):
    model, found = torch.zeros(1, dtype=torch.float64), []
    state = update.init(model)
    for change in changes:
        rows = torch.tensor([[change - 1], [change + 1]], dtype=torch.float64)
        model, state = moved(update, state, model, rows, np.full(2, 0.5), np.ones(2))
        found.append(model.item())
    assert found == pytest.approx(path, rel=1e-14)
    if isinstance(update, FedACG):  # what is evaluated is the average
        assert update.evaluated(update.init(model), model).item() == 5
        assert (state["momentum"].item(), update.evaluated(state, model).item()) == (2, 4)


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_v_begins_at_tau_squared_as_in_the_paper(kind):
    assert kind(tau=0.5).init(MODEL)["square"].tolist() == [0.25] * 9
    assert kind(tau=0.5, initial=0.0).init(MODEL)["square"].tolist() == [0.0] * 9
    assert len(FedAdagrad().init(MODEL)["mean"]) == 0  # without momentum no mean is kept


# FedACG in runs.


def test_prototypes_that_fednh_sets_are_evaluated_in_the_same_round():
    # No client moves prototypes, so they have no momentum; and m is 0 before the first round.
    tree = task(6, beta=0.3, width=8, rounds=1, participation=0.5, batch_size=64, lr=0.05)
    both = {"preset": "fednh", "server_update": {"name": "fedacg"}}
    ours, plain = (fedskew.simulate(tree, method=method).model.state_dict() for method in (both, "fednh"))
    torch.testing.assert_close(dict(ours), dict(plain), atol=1e-5, rtol=1e-7)


def test_the_preset_binds_the_pull_of_its_paper_and_gives_way_to_another_local_step():
    # beta ||y - s||^2 has the gradient 2 beta (y - s): FedProx's mu is 2 beta.
    bound = built("fedacg")
    assert (bound.local_step, bound.server_update) == (FedProx(mu=0.002), FedACG(momentum=0.85))
    assert built("fedacg+fedprox").local_step == FedProx()
    assert built("fedsam+fedacg").server_update == FedACG()


# FedAvg's.


def federation(clients=4, parameters=50, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    model = torch.tensor(rng.normal(size=parameters), dtype=dtype)
    updates = torch.tensor(rng.normal(scale=0.1, size=(clients, parameters)), dtype=dtype)
    return model, updates, rng.dirichlet(np.ones(clients))


def step(component, model, updates, weights):
    return moved(component, component.init(model), model, updates, weights, np.ones(len(updates)))[0]


def test_fedavg_is_the_weighted_mean_of_the_clients_models():
    after = step(Plain(), torch.tensor([1.0, 2.0]), torch.tensor([[4.0, 0.0], [0.0, -8.0]]), np.array([0.25, 0.75]))
    assert after.tolist() == [2.0, -4.0]
    model, updates, weights = federation()
    mean = weights @ (model + updates).numpy()
    np.testing.assert_allclose(step(Plain(), model, updates, weights).numpy(), mean, rtol=1e-13, atol=1e-14)
    # A thousand updates of 2^-24 of the model: added one by one in float32 they would all be lost.
    after = step(Plain(), torch.ones(1), torch.full((1000, 1), 1000 * 2.0**-24), np.full(1000, 1e-3))
    assert after.item() == pytest.approx(1 + 1000 * 2.0**-24, abs=2.0**-24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_depend_neither_on_layout_nor_on_threads(dtype):
    # 70,001 parameters: above the size from which PyTorch splits an operation among threads.
    model, updates, weights = federation(clients=7, parameters=70_001, dtype=dtype)
    update = Plain(lr=0.7)
    expected = step(update, model, updates, weights)
    for layout in (updates.T.contiguous().T, torch.stack([updates, -updates], dim=2)[:, :, 0]):
        assert torch.equal(step(update, model, layout, weights), expected)
    parts = [step(update, model[at], updates[:, at], weights) for at in (slice(13), slice(13, None))]
    assert torch.equal(torch.cat(parts), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(step(update, model, updates, weights), expected)
    finally:
        torch.set_num_threads(threads)


def test_updates_and_weights_that_do_not_fit_are_refused_by_name():
    _, updates, weights = federation()
    with pytest.raises(ArgumentError, match=r"^weights: expected shape \(4,\), one for each update, got \(3,\)"):
        weighted_sum(updates, weights[:3])
    with pytest.raises(ArgumentError, match=r"^updates: expected a float tensor of shape \(answered, parameters\)"):
        weighted_sum(updates[0], weights)


@pytest.mark.parametrize("turned", [False, True])
def test_a_large_sum_has_the_bits_of_pytorchs_operations(monkeypatch, turned):
    rows, weights = (
        torch.randn(5, 2**18 + 3, generator=torch.Generator().manual_seed(1)),
        np.array([0.1, 0.3, 0.0, 1 / 3, 0.2]),
    )
    rows = rows.t().contiguous().t() if turned else rows

    def sums() -> list[torch.Tensor]:
        return [weighted_sum(rows, weights), weighted_sum(rows, weights, torch.ones(2**18 + 3, dtype=torch.float64))]

    ours = sums()
    monkeypatch.setattr("fedskew.models.FlatModel.add_rows", lambda *_: False)
    assert all(map(torch.equal, ours, sums()))


@pytest.mark.parametrize("total", [torch.zeros(2**18 - 1).double(), torch.zeros(2**18, dtype=torch.int64)], ids=str)
def test_a_total_that_rows_do_not_fit_is_refused(total):
    with pytest.raises(RuntimeError):
        weighted_sum(torch.ones(2, 2**18), np.ones(2), total)
