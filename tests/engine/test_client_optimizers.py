"""Clients' optimisers in every backend, against torch.optim on the same samples; kept between rounds or not."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from federates import Straight, backends, clients, network
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import fedskew
from common import built, same, stop_at, task
from fedskew.engine import Assignment, Group, LocalTraining
from fedskew.errors import ArgumentError, BackendWarning, ComponentError, ConfigError
from fedskew.local_steps import SGD
from fedskew.parameters import component
from fedskew.personal import Personal

DATA, STEPS = clients(), 50
OPTIMISERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01, "betas": (0.8, 0.99)}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-6}),
}
every = pytest.mark.parametrize("name", OPTIMISERS)


class Wound(Straight):
    """A network that is no chain of layers."""

    def features(self, x):
        return self.fc(x) + self.fc(x).tanh()


def optimised(module, client, optimiser):
    """Take steps of torch.optim on all samples of a client."""
    rows = DATA.rows[client]
    for _ in range(STEPS):
        optimiser.zero_grad()
        functional.cross_entropy(module(DATA.inputs[rows]), DATA.targets[rows]).backward()
        optimiser.step()


def settings(name, **more):
    return {"momentum": 0.0} | OPTIMISERS[name][1] | {"optimizer": name, "batch_size": 64, "lr": 0.01} | more


@every
@pytest.mark.parametrize("kind", [Straight, Wound], ids=["chain", "as written"])
@pytest.mark.parametrize("backend", ["alone", "together"])
def test_fifty_steps_are_torch_optim_s(name, kind, backend):
    module = network(kind)
    both = backends(built(), copy.deepcopy(module), **settings(name))
    one, asked = getattr(both, backend), [Assignment(client, STEPS) for client in (0, 2, 5)]
    for client, update in zip((0, 2, 5), one.train(1, asked, both.sent), strict=True):
        expected, (optimiser, options) = copy.deepcopy(module), OPTIMISERS[name]
        optimised(expected, client, optimiser(expected.parameters(), lr=0.01, **options))
        one.model.write(both.sent.model.parameters + update.change)
        torch.testing.assert_close(dict(one.model.state_dict()), dict(expected.state_dict()), rtol=1e-6, atol=1e-6)
    if backend == "alone":
        assert ("chain" in one.model.network.rules) == (kind is Straight)


@pytest.mark.parametrize("backend", ["alone", "together"])
def test_a_client_may_keep_it_for_its_next_participation(backend):
    module = network(Straight)
    both = backends(built(), copy.deepcopy(module), **settings("adamw", keep_optimizer=True))
    one, sent = getattr(both, backend), both.sent
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01, **OPTIMISERS["adamw"][1])
    state = {}
    for round in (1, 2):
        (update,) = one.train(round, [Assignment(2, STEPS, state)], sent)
        state, parameters = update.state, sent.model.parameters + update.change
        sent = sent._replace(model=sent.model._replace(parameters=parameters))
        optimised(module, 2, optimiser)
        expected = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-5)
        assert float(state["training.adam.steps"]) == round * STEPS
    assert all(part.shape in ((), expected.shape) for part in state.values())
    fresh = backends(built(), network(Straight), **settings("adamw")).alone
    assert not fresh.train(1, [Assignment(2, 1)], sent)[0].state


GROUPS = ({"match": "*.bias", "weight_decay": 0.0}, {"match": "head.*", "lr": 0.02})


@every
@pytest.mark.parametrize("kind", [Straight, Wound], ids=["chain", "as written"])
@pytest.mark.parametrize("backend", ["alone", "together"])
def test_groups_clipping_and_a_schedule_are_torch_s(name, kind, backend):
    module, limit = network(kind), 0.3
    plan = {"schedule": "cosine", "warmup": 2, "rounds": 6, "keep_optimizer": True}
    groups = tuple(Group(**group) for group in GROUPS)
    both = backends(built(), copy.deepcopy(module), **settings(name, clip_norm=limit, groups=groups, **plan))
    one, sent = getattr(both, backend), both.sent
    optimiser, options = OPTIMISERS[name]
    own = {"fc.bias": {"weight_decay": 0.0}, "head.bias": {"weight_decay": 0.0}, "head.weight": {"lr": 0.02}}
    named = [{"params": [part]} | own.get(name, {}) for name, part in module.named_parameters()]
    optimiser = optimiser(named, lr=0.01, **options)
    rates = torch.optim.lr_scheduler.SequentialLR(
        optimiser,
        [
            torch.optim.lr_scheduler.LinearLR(optimiser, 1 / 3, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 4),
        ],
        milestones=[2],
    )
    state, rows, clipped = {}, DATA.rows[0], []
    for round in range(1, 7):
        (update,) = one.train(round, [Assignment(0, 10, state)], sent)
        state, parameters = update.state, sent.model.parameters + update.change
        sent = sent._replace(model=sent.model._replace(parameters=parameters))
        for _ in range(10):
            optimiser.zero_grad()
            functional.cross_entropy(module(DATA.inputs[rows]), DATA.targets[rows]).backward()
            clipped.append(float(nn.utils.clip_grad_norm_(module.parameters(), limit)) > limit)
            optimiser.step()
        rates.step()
        expected = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=3e-6)
    assert any(clipped)


TASK = task(6, beta=0.3, width=8, rounds=4, participation=0.5, batch_size=32, lr=0.01, optimizer="adamw")
KEPT = {"training": TASK["training"] | {"keep_optimizer": True}}


def test_processes_have_the_bits_of_one_and_a_run_that_was_stopped_goes_on_with_them(tmp_path):
    whole = fedskew.simulate({**TASK, **KEPT})
    assert not same(whole.model, fedskew.simulate(TASK).model)
    apart = fedskew.simulate({**TASK, **KEPT, "engine": {"backend": "processes", "processes": 2}})
    assert same(whole.model, apart.model)

    with pytest.raises(KeyboardInterrupt):
        fedskew.simulate({**TASK, **KEPT}, out=tmp_path, progress=stop_at(2))
    assert same(whole.model, fedskew.simulate({**TASK, **KEPT}, out=tmp_path, resume=True).model)


@dataclass(frozen=True)
class Plainly:
    """A step of one's own that knows no optimiser."""

    def init(self, settings):
        return {}

    def step(self, parameters, gradient, carried, settings):
        return parameters - settings.lr * gradient(parameters), carried


@dataclass(frozen=True)
class Doubled(Plainly):
    """A step of one's own that leaves its step to SGD()."""

    def init(self, settings):
        return SGD().init(settings)

    def step(self, parameters, gradient, carried, settings):
        return SGD().step(parameters, lambda at: 2 * gradient(at), carried, settings)


def test_a_step_of_one_s_own_goes_by_it_or_is_refused():
    with pytest.raises(ComponentError, match=r"Plainly.*: init\(\) returns nothing that Adam carries.* SGD\(\)\.step"):
        fedskew.simulate(TASK, method={"local_step": Plainly()})
    ours, theirs = (fedskew.simulate(TASK, method={"local_step": one}).model for one in (Doubled(), SGD()))
    # Adam's steps don't depend on the gradient's scale
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=1e-3)


@dataclass(frozen=True)
class InPlace(Doubled):
    """One whose short cut knows no optimiser."""

    def step_in_place(self, parameters, gradient, carried, settings):
        parameters -= settings.lr * gradient(parameters)


@dataclass(frozen=True)
class Refusing(Plainly):
    refuses: ClassVar = {f"training.{rule}": "leave it out" for rule in ("clips_gradients", "not adapts_rates")}


HEAD = {"match": "fc2.*"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip_norm": 5.0}, "training.clip_norm"),
        ({"groups": [HEAD | {"lr": 0.1}]}, "the lr of training.groups"),
        ({"groups": [HEAD | {"weight_decay": 0.1}]}, "the weight_decay of training.groups"),
    ],
)
def test_a_step_of_one_s_own_that_ignores_a_setting_is_refused_in_a_line(options, said):
    tree = task(3, rounds=1, width=8, lr=0.01, **options) | {"data": {"name": "digits", "rows": 100}}
    for step, backend in ((Plainly(), "sequential"), (Plainly(), "cohort"), (InPlace(), "sequential")):
        with pytest.raises(
            ComponentError, match=rf"^local_step .* the same with {said} as without; let SGD\(\)\.step"
        ) as seen:
            fedskew.simulate(tree, method={"local_step": step}, engine={"backend": backend})
        assert "\n" not in str(seen.value)
    fedskew.simulate(tree, method={"local_step": Doubled()})


def test_one_that_says_so_is_refused_before_it_trains():
    for key, value in (("clip_norm", 5.0), ("optimizer", "sgd")):
        with pytest.raises(ConfigError, match=f"Refusing doesn't go with training.{key}: leave it out"):
            fedskew.simulate(TASK, method={"local_step": Refusing()}, training=TASK["training"] | {key: value})


@component
class Around(Personal):
    """A personal component whose step stands around another, and ignores what that goes by."""

    def local_step(self, step):
        return Inside(step)


@dataclass(frozen=True)
class Inside(Plainly):
    inner: object


class Still(SGD):
    """A step in place that goes nowhere."""

    def step_in_place(self, parameters, gradient, carried, settings):
        gradient(parameters)


@pytest.mark.parametrize(
    ("method", "step"),
    [
        ({"personal": Around()}, r"Inside: step\(\)"),
        ({"local_step": Still()}, r"Still: step_in_place\(\)"),  # of two it is the one that is named
        ({"local_step": Plainly(), "personal": {"name": "partial", "head_epochs": 1}}, ""),  # layers that take turns
    ],
)
def test_a_step_inside_or_in_place_that_ignores_a_setting_is_refused(method, step):
    tree = task(3, rounds=1, width=8, epochs=2, clip_norm=5.0) | {"data": {"name": "digits", "client_test": 0.2}}
    with pytest.raises(ComponentError, match=f"{step}.* does the same with training.clip_norm as without"):
        fedskew.simulate(tree, method=method)


def test_in_bf16_gradients_are_those_of_autocast_and_all_else_is_float32():
    module, rows = network(Straight), DATA.rows[0]
    one = backends(built(), copy.deepcopy(module), **settings("sgd", precision="bf16", momentum=0.0)).alone
    (update,) = one.train(1, [Assignment(0, 1)], backends(built(), copy.deepcopy(module)).sent)
    with torch.autocast("cpu", torch.bfloat16):
        logits = module(DATA.inputs[rows])
    assert logits.dtype == torch.bfloat16
    functional.cross_entropy(logits.float(), DATA.targets[rows]).backward()
    gradient = nn.utils.parameters_to_vector([part.grad for part in module.parameters()])
    decay = 0.01 * nn.utils.parameters_to_vector(module.parameters()).detach()
    assert update.change.dtype == torch.float32
    torch.testing.assert_close(update.change, -0.01 * (gradient + decay), rtol=0, atol=1e-7)
    exact = backends(built(), copy.deepcopy(module), **settings("sgd", momentum=0.0))
    assert (exact.alone.train(1, [Assignment(0, 1)], exact.sent)[0].change - update.change).abs().max() > 1e-6
    assert one.model.network.eval()(DATA.inputs[:2]).dtype == torch.float32


def test_bf16_is_in_the_record_said_where_it_is_emulated_and_refused_in_a_cohort():
    tree = TASK | {"training": TASK["training"] | {"precision": "bf16", "rounds": 1}}
    able = any(held for name, held in torch.cpu.get_capabilities().items() if "bf16" in name)
    with nullcontext() if able else pytest.warns(BackendWarning, match="training.precision: this processor has no"):
        summary = fedskew.simulate(tree).summary
    assert summary["backend"] == {"name": "sequential", "network": {"bf16": "computed" if able else "emulated"}}
    with pytest.raises(ConfigError, match="training.precision: the backend 'cohort' computes in float32 only"):
        fedskew.simulate({**tree, "engine": {"backend": "cohort"}})


# Learning rates over rounds, against torch.optim.lr_scheduler; what makes no sense of them.


ROUNDS, LR = 20, 0.3


def theirs(warmup, schedule):
    """The rates of so many rounds under PyTorch's schedulers."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    after = schedule(optimiser, ROUNDS - warmup)
    if warmup:
        grows = lr_scheduler.LinearLR(optimiser, 1 / (warmup + 1), total_iters=warmup)
        after = lr_scheduler.SequentialLR(optimiser, [grows, after], milestones=[warmup])
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        after.step()
    return rates


PLANS = {
    "none": ({"lr_decay": 0.9}, lambda by, _: lr_scheduler.ExponentialLR(by, 0.9)),
    "step": ({"schedule": "step", "lr_decay": 0.5, "decay_every": 4}, lambda by, _: lr_scheduler.StepLR(by, 4, 0.5)),
    "cosine": ({"schedule": "cosine"}, lambda by, rounds: lr_scheduler.CosineAnnealingLR(by, rounds)),
    "cosine to 0.01": (
        {"schedule": "cosine", "final_lr": 0.01},
        lambda by, rounds: lr_scheduler.CosineAnnealingLR(by, rounds, 0.01),
    ),
    "linear to 0.03": (
        {"schedule": "linear", "final_lr": 0.03},
        lambda by, rounds: lr_scheduler.LinearLR(by, 1.0, 0.1, total_iters=rounds),
    ),
}


@pytest.mark.parametrize("warmup", [None, 1, 5])
@pytest.mark.parametrize("plan", PLANS)
def test_rates_are_pytorch_s(warmup, plan):
    keys, schedule = PLANS[plan]
    training = LocalTraining(lr=LR, rounds=ROUNDS, warmup=warmup, **keys)
    ours = [training.lr_of(round) for round in range(1, ROUNDS + 1)]
    assert ours == pytest.approx(theirs(warmup or 0, schedule), rel=1e-9)
    assert min(ours) > 0


def test_by_hand_and_after_the_last_round_the_rate_stays():
    cosine = LocalTraining(lr=1.0, schedule="cosine", warmup=1, rounds=5)
    rates = [cosine.lr_of(round) for round in range(1, 8)]
    assert rates == pytest.approx([0.5, 1, (1 + 0.5**0.5) / 2, 0.5, *[(1 - 0.5**0.5) / 2] * 3])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"schedule": "cosine"}, "rounds: a cosine schedule ends with the last one"),
        ({"schedule": "linear", "rounds": 9, "lr_decay": 0.9}, "lr_decay: a linear schedule has its own"),
        ({"schedule": "cosine", "rounds": 5, "warmup": 5}, "warmup: 5, of 5 in all, leaves no round for"),
        ({"schedule": "cosine", "rounds": 5, "final_lr": 0.01}, "final_lr: 0.01 is not below lr"),
        ({"final_lr": 0.001}, 'final_lr: is of schedule = "cosine" or "linear"'),
        ({"schedule": "step", "lr_decay": 0.5}, "decay_every: missing"),
        ({"schedule": "step", "decay_every": 3}, "lr_decay: at 1 a step schedule changes nothing"),
        ({"decay_every": 3, "lr_decay": 0.5}, 'decay_every: is of schedule = "step"'),
        ({"groups": (Group("head.*"),)}, "groups: one says neither lr nor weight_decay"),
    ],
)
def test_what_makes_no_sense_is_refused(keys, says):
    with pytest.raises(ArgumentError) as why:
        LocalTraining(**keys)
    assert str(why.value).startswith(says)


def test_a_group_that_nothing_belongs_to_is_refused_with_the_nearest_name():
    names, decay = ("fc.weight", "fc.bias", "head.weight"), 0.0
    LocalTraining(groups=(Group("*.bias", None, decay), Group("fc.*", 0.1))).check_groups(names)
    with pytest.raises(ArgumentError, match=r"groups\[0\]\.match: .* like 'haed.*' \(did you mean 'head.\*'\?\)"):
        LocalTraining(groups=(Group("haed.*", 0.1),)).check_groups(names)
    with pytest.raises(ArgumentError, match=r"groups\[1\]\.match: all that 'fc.bias' matches is in groups before it"):
        LocalTraining(groups=(Group("fc.*", 0.1), Group("fc.bias", None, decay))).check_groups(names)
