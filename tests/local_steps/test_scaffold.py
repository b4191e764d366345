"""SCAFFOLD's local step and its control variates. Where they lead: tests/engine/test_quadratics.py."""

from __future__ import annotations

import pytest
import torch

from fedskew.hooks import LocalEnd, RoundEnd
from fedskew.local_steps import INDEX, StepSettings

Scaffold = INDEX["scaffold"]

SERVER, CLIENT, CHANGE = "scaffold.server", "scaffold.client", "scaffold.change"  # as in checkpoints

ONE, TWO = Scaffold(option="one"), Scaffold()


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def local_end(start, parameters, steps=1, lr=0.1, momentum=0.0, own=None, server=None, full_gradient=None) -> LocalEnd:
    zeros = torch.zeros_like(start)
    return LocalEnd(
        start=start,
        parameters=parameters,
        buffers=values(),
        steps=steps,
        lr=lr,
        momentum=momentum,
        client={CLIENT: zeros if own is None else own},
        broadcast={SERVER: zeros if server is None else server},
        gathered={},
        full_gradient=full_gradient or (lambda at: at),
        full_loss=lambda at: at.sum(),
    )


def test_the_correction_enters_the_gradient_before_momentum_and_weight_decay():
    # theta 1, gradient 2, c_k 0.5, c 3, weight decay 1, momentum 0.5 with buffer 4, lr 0.1:
    # corrected 4.5, decayed 5.5, buffer 2 + 5.5 = 7.5, theta 1 - 0.75.
    settings = StepSettings(values(9), 0.1, 0.5, 1.0, {SERVER: values(3)}, {CLIENT: values(0.5)})
    after, buffer = TWO.step(values(1), lambda _: values(2), {"momentum": values(4)}, settings)
    assert after.item() == pytest.approx(0.25, abs=1e-15)
    assert buffer["momentum"].item() == pytest.approx(7.5, abs=1e-15)


def test_option_two_worked_out_by_hand():
    # Two steps without momentum from 1 to 0.4, lr 0.1: mean gradient 0.6 / 0.2 = 3. c_k = 0.5 - 2 + 3.
    state, reply = TWO.end_local(local_end(values(1), values(0.4), steps=2, own=values(0.5), server=values(2)))
    assert state[CLIENT].item() == pytest.approx(1.5)
    assert reply[CHANGE].item() == pytest.approx(1.0)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_option_two_recovers_a_constant_gradient_whatever_momentum_and_control_variates(momentum, steps):
    gradient, own, server = values(2, -1), values(0.3, 0.7), values(-0.2, 0.1)
    start = values(5, 6)
    settings = StepSettings(start, 0.05, momentum, 0.0, {SERVER: server}, {CLIENT: own})
    parameters, carried = start, {"momentum": torch.zeros_like(start)}
    for _ in range(steps):
        parameters, carried = TWO.step(parameters, lambda _: gradient, carried, settings)
    state, _ = TWO.end_local(local_end(start, parameters, steps, 0.05, momentum, own, server))
    torch.testing.assert_close(state[CLIENT], gradient)


def test_option_one_takes_the_full_gradient_at_the_sent_model():
    end = local_end(values(3, 4), values(0, 0), own=values(1, 1), full_gradient=lambda at: 10 * at)
    state, reply = ONE.end_local(end)
    assert state[CLIENT].tolist() == [30, 40]
    assert reply[CHANGE].tolist() == [29, 39]


@pytest.mark.parametrize("scaffold", [ONE, TWO], ids=repr)
def test_without_a_step_nothing_changes(scaffold):
    own = values(1, 2)
    state, reply = scaffold.end_local(local_end(values(3, 4), values(3, 4), steps=0, own=own, server=values(5, 5)))
    assert torch.equal(state[CLIENT], own)
    assert not reply[CHANGE].any()


def test_an_update_of_zero_says_that_the_gradient_is_zero():
    state, _ = TWO.end_local(local_end(values(3, 4), values(3, 4), steps=5))
    assert not state[CLIENT].any()


def test_the_server_divides_by_all_clients_not_by_those_who_answered():
    old = values(1, 1)
    replies = [{CHANGE: values(4, 0)}, {CHANGE: values(2, -6)}]
    end = RoundEnd(old, old, torch.zeros(2, 2), torch.arange(2).numpy(), torch.ones(2).numpy(), replies, clients=12)
    assert TWO.end_round({SERVER: old}, end)[SERVER].tolist() == [1.5, 0.5]


def test_the_server_sends_what_it_keeps_and_begins_with_zeros():
    state = TWO.init_server(torch.ones(3), 7)
    assert state[SERVER].tolist() == [0, 0, 0]
    assert TWO.broadcast(state) == state
