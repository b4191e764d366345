"""Adam and AdamW in every local step, against torch.optim: one client, clients that train together, in place."""

import pytest
import torch

from fedskew.hooks import Hooks
from fedskew.local_steps import INDEX, SGD, Adam, StepSettings
from fedskew.personal._partial import Alternating

START = torch.randn(37, generator=torch.Generator().manual_seed(0))  # longer than a vector of the processor, and odd
ADAM, ADAMW = Adam(), Adam((0.8, 0.95), 1e-6, decoupled=True)
STEPS = 50


def gradient(at):
    """Of a function with valleys of several widths, each coordinate's own."""
    return torch.linspace(0.1, 3, at.shape[-1]) * (at - 0.3) + 0.2 * torch.sin(5 * at)


def theirs(adam, start=START, at=gradient, steps=STEPS, **options):
    """Parameters after so many steps of torch.optim."""
    parameters = start.clone().requires_grad_()
    kind = torch.optim.SGD if adam is None else torch.optim.AdamW if adam.decoupled else torch.optim.Adam
    own = {} if adam is None else {"betas": adam.betas, "eps": adam.eps}
    optimiser = kind([parameters], **own, **options)
    for _ in range(steps):
        parameters.grad = at(parameters.detach())
        optimiser.step()
    return parameters.detach()


def ours(step, settings, start=START, steps=STEPS, carried=None):
    parameters, carried = start, step.init(settings) if carried is None else carried
    for _ in range(steps):
        parameters, carried = step.step(parameters, gradient, carried, settings)
    return parameters, carried


every = pytest.mark.parametrize("adam", [ADAM, ADAMW], ids=["adam", "adamw"])
decays = pytest.mark.parametrize("decay", [0.0, 0.1])


@every
@decays
def test_it_is_torch_optim_s(adam, decay):
    settings = StepSettings(START, 0.03, weight_decay=decay, adam=adam)
    expected = theirs(adam, lr=0.03, weight_decay=decay)
    assert (expected - START).norm() > 1
    torch.testing.assert_close(ours(SGD(), settings)[0], expected, rtol=1e-6, atol=1e-6)


@every
@decays
def test_in_place_it_is_the_same_for_one_client_and_for_several_that_took_steps_before(adam, decay):
    settings = StepSettings(START, 0.03, weight_decay=decay, adam=adam)
    starts = torch.stack([START, START + 1, -START])
    before = [ours(SGD(), settings, start, steps=at)[1] for at, start in enumerate(starts)]
    expected = [ours(SGD(), settings, start, carried=own)[0] for start, own in zip(starts, before, strict=True)]
    alone, stacked = starts[2].clone(), starts.clone()
    own = {name: part.clone() for name, part in before[2].items()}
    together = {name: torch.stack([one[name] for one in before]) for name in before[0]}
    for _ in range(STEPS):
        SGD().step_in_place(alone, gradient, own, settings)
        SGD().step_in_place(stacked, gradient, together, settings)
    torch.testing.assert_close(stacked, torch.stack(expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(alone, expected[2], rtol=1e-6, atol=1e-6)
    assert together["adam.steps"].tolist() == [STEPS, STEPS + 1, STEPS + 2]


@every
def test_mapped_over_clients_with_rates_of_their_own_it_is_each_by_itself(adam):
    rates, starts = torch.tensor([0.01, 0.03]), torch.stack([START, START - 1])

    def train(start, lr):
        return ours(SGD(), StepSettings(start, lr, weight_decay=0.1, adam=adam), start, steps=5)[0]

    expected = [theirs(adam, starts[at], steps=5, lr=float(rates[at]), weight_decay=0.1) for at in range(2)]
    torch.testing.assert_close(torch.func.vmap(train)(starts, rates), torch.stack(expected), rtol=1e-6, atol=1e-6)


RATES, DECAYS = torch.linspace(0.5, 2, 37), torch.linspace(0, 0.2, 37)


@pytest.mark.parametrize("adam", [None, ADAM, ADAMW], ids=["sgd", "adam", "adamw"])
@pytest.mark.parametrize("grouped", [False, True])
def test_clipping_and_parameters_of_their_own_are_torch_s(adam, grouped):
    parts = [part.requires_grad_() for part in START.clone().split(1 if grouped else 37)]
    groups = [{"params": [part]} for part in parts]
    for at, group in enumerate(groups if grouped else ()):
        group |= {"lr": 0.03 * float(RATES[at]), "weight_decay": float(DECAYS[at])}
    kind = torch.optim.SGD if adam is None else torch.optim.AdamW if adam.decoupled else torch.optim.Adam
    more = {"momentum": 0.9} if adam is None else {"betas": adam.betas, "eps": adam.eps}
    optimiser, clipped, limit = kind(groups, lr=0.03, weight_decay=0.1, **more), 0, 2.0 if adam is None else 7.0
    for _ in range(STEPS):
        slope = gradient(torch.cat(parts).detach())
        for part, own in zip(parts, slope.split(len(parts[0])), strict=True):
            part.grad = own.clone()
        clipped += float(torch.nn.utils.clip_grad_norm_(parts, limit)) > limit
        optimiser.step()
    assert 0 < clipped < STEPS
    settings = StepSettings(START, 0.03, 0.0 if adam else 0.9, 0.1, adam=adam, clip_norm=limit)
    own = {"rates": RATES, "decays": DECAYS, "spans": tuple((at, at + 1) for at in range(37))}
    settings = settings._replace(**own) if grouped else settings
    expected, (pure, _) = torch.cat(parts).detach(), ours(SGD(), settings)
    torch.testing.assert_close(pure, expected, rtol=1e-6, atol=2e-6)
    stacked, carried = torch.stack([START, START]), SGD().init(settings)
    carried = {name: torch.stack([part, part]) for name, part in carried.items()}
    for _ in range(STEPS):
        SGD().step_in_place(stacked, gradient, carried, settings)
    torch.testing.assert_close(stacked, torch.stack([expected] * 2), rtol=1e-6, atol=2e-6)


def test_a_short_gradient_is_not_clipped_and_one_of_zeros_stays():
    settings = StepSettings(torch.zeros(2), 1.0, clip_norm=5.0)
    for slope, expected in (([3.0, 4.0], [3.0, 4.0]), ([6.0, 8.0], [3.0, 4.0]), ([0.0, 0.0], [0.0, 0.0])):
        after, _ = SGD().step(torch.zeros(2), lambda _, slope=slope: torch.tensor(slope), {}, settings)
        torch.testing.assert_close(-after, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["fedprox", "fedsam", "feddyn", "fedgf", "fedbabu"])
@every
def test_steps_of_methods_give_it_their_own_gradient(name, adam):
    step = INDEX[name]()
    hooks = step if isinstance(step, Hooks) else Hooks()
    broadcast, client = hooks.broadcast(hooks.init_server(START, 3)), hooks.init_client(START)
    given = []
    asks = StepSettings(START, 1.0, broadcast=broadcast, client=client)

    def own(at):  # what the step goes along: where SGD with lr 1 and no decay ends
        given.append(at)
        return at - step.step(at, gradient, {}, asks)[0]

    settings = asks._replace(lr=0.01, weight_decay=0.1, adam=adam)
    expected = theirs(adam, START + 1, own, steps=10, lr=0.01, weight_decay=0.1)
    torch.testing.assert_close(ours(step, settings, START + 1, steps=10)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adam", [None, ADAM, ADAMW], ids=["sgd", "adam", "adamw"])
def test_of_layers_that_wait_for_others_the_first_step_is_a_first_step(adam):
    kept = torch.arange(37) < 10
    settings = StepSettings(START, 0.03, 0.0 if adam else 0.9, 0.1, adam=adam)
    settings = settings._replace(client={"private.first": torch.tensor(4.0), "private.mask": kept})
    after, _ = ours(Alternating(SGD()), settings, steps=9)
    more = {"momentum": 0.9} if adam is None else {}
    first = theirs(adam, START[kept], lambda at: gradient_of(kept, at), steps=4, lr=0.03, weight_decay=0.1, **more)
    second = theirs(adam, START[~kept], lambda at: gradient_of(~kept, at), steps=5, lr=0.03, weight_decay=0.1, **more)
    torch.testing.assert_close(after[kept], first, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(after[~kept], second, rtol=1e-6, atol=1e-6)


def gradient_of(mask, part):
    whole = torch.zeros(37)
    whole[mask] = part
    return gradient(whole)[mask]


def test_only_plain_sgd_moves_against_the_gradient_and_does_nothing_else():
    assert StepSettings(START, 0.25).plain_rate() == 0.25
    ones = torch.ones(37)
    for more in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"adam": ADAM}, {"clip_norm": 0.0}, {"rates": ones}):
        assert StepSettings(START, 0.25, **more).plain_rate() is None
