"""FedBABU, FedDyn, FedGF and SCAFFOLD by hand; where the latter lead: tests/engine/test_quadratics.py."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from common import alike, built, local_end, moved, round_end, same, task
from fedskew import engine, methods, server_updates
from fedskew.errors import ArgumentError
from fedskew.local_steps import INDEX, StepSettings

FedBABU, FedGF, FedSAM, Scaffold = (INDEX[name] for name in ("fedbabu", "fedgf", "fedsam", "scaffold"))
FedDyn, FedDynServer = INDEX["feddyn"], server_updates.INDEX["feddyn"]


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# FedBABU.

TASK = task(4, beta=0.3, width=8, rounds=2, batch_size=64, lr=0.1, momentum=0.5, weight_decay=0.01)
UNTRAINED = {"training": TASK["training"] | {"rounds": 0}}


def run(method, **more):
    return fedskew.simulate({**TASK, "method": method, **more})


def test_the_last_layer_stays_as_it_was_drawn_is_not_sent_and_the_rest_is_trained():
    plain, babu = run("fedavg"), run("fedbabu")
    assert alike(run("fedavg", **UNTRAINED).model, babu.model) == {"head.weight", "head.bias"}
    less = plain.rounds[-1]["bytes_up"] - babu.rounds[-1]["bytes_up"]
    assert less == 4 * 4 * (8 * 10 + 10)  # four clients, numbers of 4 bytes


def test_on_a_network_whose_head_is_frozen_it_is_sgd():
    network = fedskew.models.build("mlp3", 10, (1, 8, 8), width=8, generator=torch.Generator().manual_seed(4))
    network.head.requires_grad_(False)
    assert same(*(run(method, model=network).model for method in ("fedavg", "fedbabu")))


def test_behind_moons_projection_it_is_the_new_last_layer_that_stays():
    still = alike(run("moon+fedbabu").model, run("moon+fedbabu", **UNTRAINED).model)
    assert "head.weight" in still
    assert "projection.0.weight" not in still


def test_a_network_without_a_head_is_refused_with_the_cure():
    with pytest.raises(ArgumentError, match=r"network: Sequential does not say .* give it a linear layer self.head"):
        FedBABU().adapt(nn.Sequential(nn.Linear(3, 2)), torch.Generator())


# FedDyn: both halves, and that they go together only.


def dyn_end(start: torch.Tensor, after: torch.Tensor, kept: dict) -> dict[str, torch.Tensor]:
    own, returned = FedDyn().end_local(local_end(start, after, client=kept))
    assert returned == {}
    return own


def test_two_rounds_of_two_clients_by_hand():
    # alpha = 1/2. Round 1 from 0: y = (2, 0), r = (2, 0), u = 1, w = 0 + 1 + 1. Round 2 from 2: the first client's
    # gradient is (2 - 4) + 2 / 2 = -1, the second's 2 + 0: y = (2.5, 1), r = (2.5, -1), u = 1 - 1/4, w = 2 - 1/4 + 3/4.
    step, update = FedDyn(alpha=0.5), FedDynServer(clients=2)
    w = torch.zeros(1)
    state, kept = update.init(w), [step.init_client(w), step.init_client(w)]
    for expected, drifts, u, following in (((2, 0), (2, 0), 1.0, 2.0), ((2.5, 1), (2.5, -1), 0.75, 2.5)):
        ys = [
            step.step(w, lambda at, target=target: at - target, None, StepSettings(start=w, lr=0.5, client=own))[0]
            for target, own in zip((4.0, 0.0), kept, strict=True)
        ]
        kept = [dyn_end(w, y, own) for y, own in zip(ys, kept, strict=True)]
        assert (*(y.item() for y in ys), *(own["feddyn.drift"].item() for own in kept)) == (*expected, *drifts)
        w, state = moved(update, state, w, torch.stack([y - w for y in ys]), np.full(2, 0.5), np.ones(2))
        assert (state["drift"].item(), w.item()) == (u, following)


def test_two_local_steps_are_those_of_the_paper_s_g() -> None:
    # alpha = 1/4, w = 1, r = 2, so g_k = -1/2; gradients y - 4 - g_k + (y - 1) / 4, steps of 1/2:
    # 1 -> 1 + 2.5 / 2 = 2.25 -> 2.25 - (-1.75 + 0.5 + 0.3125) / 2 = 2.71875; g_k <- -1/2 - 1.71875 / 4.
    step, w, kept = FedDyn(alpha=0.25), torch.ones(1), {"feddyn.drift": torch.tensor([2.0])}
    settings, y = StepSettings(start=w, lr=0.5, client=kept), w
    for following in (2.25, 2.71875):
        y, _ = step.step(y, lambda at: at - 4, None, settings)
        assert y.item() == following
    assert -0.25 * dyn_end(w, y, kept)["feddyn.drift"].item() == -0.5 - 1.71875 / 4


def test_the_server_divides_by_all_clients_which_a_run_tells_it():
    update, w = FedDynServer(clients=4), torch.zeros(1)
    w, state = moved(update, update.init(w), w, torch.tensor([[4.0]]), np.ones(1), np.ones(1))
    assert (state["drift"].item(), w.item()) == (1.0, 5.0)
    with pytest.raises(ArgumentError, match="clients: give the number of all clients"):
        moved(FedDynServer(), {}, torch.zeros(1), torch.zeros(1, 1), np.ones(1), np.ones(1))
    tree = task(6, beta=0.3, width=8, rounds=1, participation=0.5, batch_size=64, lr=0.05)
    assert "clients" not in fedskew.simulate(tree, method="feddyn").config.method["server_update"]
    federation = engine.Federation(built("feddyn"), None, np.ones((4, 2)), None, 1.0, seed=0)
    for one in (federation, replace(federation, seed=1)):
        assert one.method.server_update.clients == 4


def test_a_method_called_clients_is_no_parameter_of_that_name():
    @dataclass(frozen=True)
    class Own(server_updates.Plain):
        def clients(self) -> int:
            return 3

    method = replace(built(), server_update=Own())
    assert engine.Federation(method, None, np.ones((4, 2)), None, 1.0, seed=0).method.server_update == Own()


def test_the_preset_costs_a_model_at_each_client_has_equal_weights_and_gives_way_to_others_with_a_word():
    assert str(methods.cost(built("feddyn"))) == "client keeps 1 model"
    assert methods.check(built("feddyn")) == []
    (warning,) = methods.check(built("feddyn+fedla"))
    assert warning.startswith("feddyn with fedla: FedDyn's terms lead every client")


# FedGF.

PERTURBED, SHARE, WINDOW = "fedgf.perturbed", "fedgf.share", "fedgf.window"  # as in checkpoints


def server_state(step, *rounds: tuple[list[float], list[float], list[float]]):
    """What the server keeps after rounds from a model to another, with updates of these lengths."""
    state = step.init_server(torch.zeros(2), 9)
    for old, new, lengths in rounds:
        changes = torch.tensor([[length, 0.0] for length in lengths])
        state = step.end_round(state, round_end((), torch.tensor(old), torch.tensor(new), changes=changes))
    return state


def test_one_step_worked_out_by_hand():
    # theta (3, 4), gradient the identity, rho 0.5: ascended to (3.3, 4.4). Server's point (10, 0), c 0.25:
    # the gradient is taken at (0.75 * 3.3 + 2.5, 0.75 * 4.4) = (4.975, 3.3); lr 0.1.
    theta = values(3, 4)
    settings = StepSettings(theta, 0.1, broadcast={PERTURBED: values(10, 0), SHARE: values(0.25)[0]})
    after, _ = FedGF(rho=0.5).step(theta, lambda at: at, torch.zeros_like(theta), settings)
    torch.testing.assert_close(after, theta - 0.1 * values(4.975, 3.3), rtol=0, atol=1e-7)


def test_the_first_round_is_fedsam_to_the_bit():
    step, start = FedGF(rho=0.2), torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = StepSettings(start, 0.003, 0.9, 0.01, step.broadcast(step.init_server(start + 5, 9)))
    ends = []
    for one in (step, FedSAM(rho=0.2)):
        at, carried = start, {"momentum": torch.zeros_like(start)}
        for _ in range(5):
            at, carried = one.step(at, lambda at: 4 * at**3, carried, settings)
        ends.append(at)
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("parameters", "round", "perturbed"),
    [
        # From (1, 1) to (4, 5): uphill is (-3, -4) / 5, and reach 0.5 gives (4 - 0.3, 5 - 0.4).
        ({"rho": 0.5}, ([1.0, 1.0], [4.0, 5.0], [1.0]), [3.7, 4.6]),
        ({"rho": 0.5, "server_rho": 1.0}, ([1.0, 1.0], [4.0, 5.0], [1.0]), [3.4, 4.2]),
        ({}, ([1.0, 2.0], [1.0, 2.0], [0.0]), [1.0, 2.0]),  # a model that did not move is its own worst point
    ],
)
def test_the_server_perturbs_the_new_model_against_its_last_move(parameters, round, perturbed):
    state = server_state(FedGF(**parameters), round)
    torch.testing.assert_close(state[PERTURBED], torch.tensor(perturbed))
    assert state[WINDOW].tolist() == [round[2][0]]


def test_c_is_the_share_of_divergent_rounds_in_the_window():
    step = FedGF(threshold=0.5, window=3)
    far, near = (([0.0, 0.0], [1.0, 1.0], [0.9, other]) for other in (0.2, 0.05))  # mean distances 0.55 and 0.475
    rounds = [far, near, near, far, far]
    shares = [step.broadcast(server_state(step, *rounds[:many]))[SHARE].item() for many in range(6)]
    assert shares == pytest.approx([0, 1, 1 / 2, 1 / 3, 1 / 3, 2 / 3])
    assert len(server_state(step, *rounds)[WINDOW]) == 3


# SCAFFOLD.

SERVER, CLIENT, CHANGE = "scaffold.server", "scaffold.client", "scaffold.change"  # as in checkpoints
ONE, TWO = Scaffold(option="one"), Scaffold()


def variates(step, start, parameters, own=(0.0,), server=(0.0,), **others) -> tuple[list[float], list[float]]:
    """The client's new control variate, and the change that it returns."""
    end = local_end(start, parameters, client={CLIENT: values(*own)}, broadcast={SERVER: values(*server)}, **others)
    state, reply = step.end_local(end)
    return state[CLIENT].tolist(), reply[CHANGE].tolist()


def test_the_correction_enters_the_gradient_before_momentum_and_weight_decay():
    # theta 1, gradient 2, c_k 0.5, c 3, weight decay 1, momentum 0.5 with buffer 4, lr 0.1:
    # corrected 4.5, decayed 5.5, buffer 2 + 5.5 = 7.5, theta 1 - 0.75.
    settings = StepSettings(values(9), 0.1, 0.5, 1.0, {SERVER: values(3)}, {CLIENT: values(0.5)})
    after, buffer = TWO.step(values(1), lambda _: values(2), {"momentum": values(4)}, settings)
    assert (after.item(), buffer["momentum"].item()) == pytest.approx((0.25, 7.5), abs=1e-15)


def test_control_variates_worked_out_by_hand():
    # Two steps without momentum from 1 to 0.4, lr 0.1: mean gradient 0.6 / 0.2 = 3. c_k = 0.5 - 2 + 3.
    own, change = variates(TWO, values(1), values(0.4), (0.5,), (2,), steps=2)
    assert (own, change) == (pytest.approx([1.5]), pytest.approx([1.0]))
    # Option one takes the full gradient at the sent model.
    full = {"full_gradient": lambda at: 10 * at}
    assert variates(ONE, values(3, 4), values(0, 0), (1, 1), (0, 0), **full) == ([30, 40], [29, 39])
    for step in (ONE, TWO):  # without a step nothing changes
        assert variates(step, values(3, 4), values(3, 4), (1, 2), (5, 5), steps=0) == ([1, 2], [0, 0])
    # An update of zero says that the gradient is zero.
    assert variates(TWO, values(3, 4), values(3, 4), (0, 0), (0, 0), steps=5)[0] == [0, 0]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_option_two_recovers_a_constant_gradient_whatever_momentum_and_control_variates(momentum, steps):
    gradient, own, server, start = values(2, -1), (0.3, 0.7), (-0.2, 0.1), values(5, 6)
    settings = StepSettings(start, 0.05, momentum, 0.0, {SERVER: values(*server)}, {CLIENT: values(*own)})
    parameters, carried = start, {"momentum": torch.zeros_like(start)}
    for _ in range(steps):
        parameters, carried = TWO.step(parameters, lambda _: gradient, carried, settings)
    found, _ = variates(TWO, start, parameters, own, server, steps=steps, lr=0.05, momentum=momentum)
    assert found == pytest.approx(gradient.tolist())


def test_the_server_begins_with_zeros_which_it_sends_and_divides_by_all_clients_not_by_those_who_answered():
    state = TWO.init_server(torch.ones(3), 7)
    assert state[SERVER].tolist() == [0, 0, 0]
    assert TWO.broadcast(state) == state
    end = round_end([{CHANGE: values(4, 0)}, {CHANGE: values(2, -6)}], values(1, 1), clients=12)
    assert TWO.end_round({SERVER: values(1, 1)}, end)[SERVER].tolist() == [1.5, 0.5]
