"""FedDyn: both halves by hand, and that they go together only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedskew
from fedskew import engine, local_steps, methods, server_updates
from fedskew.errors import ArgumentError, CombinationError
from fedskew.hooks import LocalEnd
from fedskew.local_steps import StepSettings
from updating import moved

Step = local_steps.INDEX["feddyn"]
Update = server_updates.INDEX["feddyn"]

TASK = {
    "data": "digits",
    "partition": {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.3, "min_size": 1},
    "model": {"name": "mlp3", "width": 8},
    "training": {"rounds": 2, "participation": 0.5, "epochs": 1, "batch_size": 64, "lr": 0.05},
}


def trained(step: local_steps.LocalStep, target: float, start: torch.Tensor, kept: dict) -> tuple[torch.Tensor, dict]:
    """One local step of length 1/2 on (y - target)^2 / 2, and what the client keeps."""
    settings = StepSettings(start=start, lr=0.5, client=kept)
    after, _ = step.step(start, lambda at: at - target, None, settings)
    end = LocalEnd(start, after, after[:0], 1, 0.5, 0.0, kept, {}, {}, torch.zeros_like, torch.sum)
    own, returned = step.end_local(end)
    assert returned == {}
    return after, own


def test_two_rounds_of_two_clients_by_hand():
    # alpha = 1/2. Round 1 from 0: y = (2, 0), r = (2, 0), u = 1, w = 0 + 1 + 1. Round 2 from 2: the first client's
    # gradient is (2 - 4) + 2 / 2 = -1, the second's 2 + 0: y = (2.5, 1), r = (2.5, -1), u = 1 - 1/4, w = 2 - 1/4 + 3/4.
    step, update = Step(alpha=0.5), Update(clients=2)
    w = torch.zeros(1)
    state, kept = update.init(w), [step.init_client(w), step.init_client(w)]
    for ys, drifts, u, following in (((2, 0), (2, 0), 1.0, 2.0), ((2.5, 1), (2.5, -1), 0.75, 2.5)):
        found = [trained(step, target, w, own) for target, own in zip((4.0, 0.0), kept, strict=True)]
        assert tuple(y.item() for y, _ in found) == ys
        kept = [own for _, own in found]
        assert tuple(own["feddyn.drift"].item() for own in kept) == drifts
        updates = torch.stack([y - w for y, _ in found])
        w, state = moved(update, state, w, updates, np.full(2, 0.5), np.ones(2))
        assert (state["drift"].item(), w.item()) == (u, following)


def test_two_local_steps_are_those_of_the_paper_s_g() -> None:
    # alpha = 1/4, w = 1, r = 2, so g_k = -1/2; gradients y - 4 - g_k + (y - 1) / 4, steps of 1/2:
    # 1 -> 1 + 2.5 / 2 = 2.25 -> 2.25 - (-1.75 + 0.5 + 0.3125) / 2 = 2.71875; g_k <- -1/2 - 1.71875 / 4.
    step, w, kept = Step(alpha=0.25), torch.ones(1), {"feddyn.drift": torch.tensor([2.0])}
    settings, y = StepSettings(start=w, lr=0.5, client=kept), w
    for following in (2.25, 2.71875):
        y, _ = step.step(y, lambda at: at - 4, None, settings)
        assert y.item() == following
    own, _ = step.end_local(LocalEnd(w, y, y[:0], 2, 0.5, 0.0, kept, {}, {}, torch.zeros_like, torch.sum))
    assert -0.25 * own["feddyn.drift"].item() == -0.5 - 1.71875 / 4


def test_the_server_divides_by_all_clients_and_not_by_those_that_replied():
    update = Update(clients=4)
    w = torch.zeros(1)
    w, state = moved(update, update.init(w), w, torch.tensor([[4.0]]), np.ones(1), np.ones(1))
    assert (state["drift"].item(), w.item()) == (1.0, 5.0)


def test_a_run_tells_the_server_how_many_clients_there_are():
    result = fedskew.simulate(**TASK, method="feddyn")
    assert "clients" not in result.config.method["server_update"]
    with pytest.raises(ArgumentError, match="clients: give the number of all clients"):
        moved(Update(), {}, torch.zeros(1), torch.zeros(1, 1), np.ones(1), np.ones(1))
    wrong = {"preset": "feddyn", "server_update": {"clients": 5}}
    with pytest.raises(ArgumentError, match=r"server_update\.clients: 5 isn't the number of clients, which is 6"):
        fedskew.simulate(**TASK, method=wrong)


def test_a_method_called_clients_is_no_parameter_of_that_name():
    @dataclass(frozen=True)
    class Own(server_updates.Plain):
        def clients(self) -> int:
            return 3

    method = replace(methods.build(methods.expand({"preset": "fedavg"})), server_update=Own())
    federation = engine.Federation(method, None, np.ones((4, 2)), None, 1.0, seed=0)
    assert federation.method.server_update == Own()


def test_every_part_of_a_run_sees_the_number_of_clients():
    method = methods.build(methods.expand({"preset": "feddyn"}))
    federation = engine.Federation(method, None, np.ones((4, 2)), None, 1.0, seed=0)
    assert federation.method.server_update.clients == 4
    assert replace(federation, seed=1).method.server_update.clients == 4


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"local_step": "feddyn"}, "feddyn doesn't go with server_update.plain: it is one half of FedDyn.*preset"),
        ({"server_update": "feddyn"}, "feddyn doesn't go with local_step.sgd: it is one half of FedDyn.*preset"),
        ({"preset": "feddyn+fedadam"}, "both fill the server_update slot"),
        ({"preset": "feddyn+median"}, "drift.* averaged plainly"),
        ({"preset": "feddyn+fedconcat"}, "fedconcat doesn't go with local_step.feddyn"),
    ],
)
def test_neither_half_goes_without_the_other(tables, message):
    with pytest.raises(CombinationError, match=message):
        methods.expand(tables)


def test_the_preset_has_equal_weights_and_gives_way_to_others_with_a_word():
    assert methods.check(methods.build(methods.expand({"preset": "feddyn"}))) == []
    other = methods.build(methods.expand({"preset": "feddyn+fedla"}))
    (warning,) = methods.check(other)
    assert warning.startswith("feddyn with fedla: FedDyn's terms lead every client")


def test_it_costs_a_model_at_each_client_and_no_traffic():
    cost = methods.cost(methods.build(methods.expand({"preset": "feddyn"})))
    assert str(cost) == "client keeps 1 model"
