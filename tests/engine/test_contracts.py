"""What components of a user's own return is checked: a mistake is one line that names the component and the place."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedskew
from common import bits, task
from fedskew.aggregation import Aggregation
from fedskew.errors import FedskewError
from fedskew.hooks import Hooks

TASK = task(10, labels=3, rounds=1, participation=0.5, lr=0.05)


def error_of(**tables) -> str:
    """The one line that a run ends with."""
    with pytest.raises(FedskewError) as raised:
        fedskew.simulate(TASK | tables)
    assert "\n" not in str(raised.value)
    return f"{type(raised.value).__name__} {raised.value}"


MISTAKES: list[dict[str, Any]] = []
"""What a component of this number does in place of what is right, by function."""


def own(**functions: Any) -> Own:
    MISTAKES.append(functions)
    return Own(len(MISTAKES) - 1)


@dataclass(frozen=True)
class Own(Hooks, Aggregation):
    """A component of any kind, with the mistakes of this number."""

    number: int
    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()
    reads_each_update: ClassVar[bool] = True

    def does(self, function, right, *arguments):
        mistakes = MISTAKES[self.number]
        return mistakes[function](*arguments) if function in mistakes else right

    def init(self, given):
        return self.does("init", None, given)

    def weigh(self, answered):
        return self.does("weigh", None, answered)

    def select(self, state, counts, size, rng, first=None):
        return self.does("select", None, size, counts)

    def value(self, batch, context):
        return self.does("value", batch.logits.square().mean(), batch, context)

    def end_local(self, end):
        return self.does("end_local", ({}, {}), end)

    def step(self, parameters, gradient, carried, settings):
        following = parameters - settings.lr * gradient(parameters)
        return self.does("step", (following, None), following, parameters)

    def share(self, update, steps, weight):
        return self.does("share", (1.0, {}), update)

    def combine(self, updates, weights):
        return self.does("combine", (updates, weights), updates, weights)

    def move(self, state, parameters, change, extras):
        following = (parameters + change).to(parameters.dtype)
        return self.does("move", (following, state), following)


def weighs(values) -> tuple[str, str, Any]:
    return "weighting", "weigh", lambda answered: values


def chooses(*ids) -> tuple[str, str, Any]:
    return "selection", "select", lambda size, counts: (list(ids), None)


def does(slot: str, function: str, what) -> tuple[str, str, Any]:
    return slot, function, what


QUOTAS = SimpleNamespace(quotas=-np.ones((5, 10)))
ONE_EACH = "weigh() must return one weight for each of the 5 clients that replied, not"
FACTOR = "share() must return (a factor from 0 to 1, finite numbers by name), not"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (weighs(np.ones(5)), "weigh() returned weights of sum 5; they must sum to 1"),
        (weighs(np.array([2.0, -1, 0, 0, 0])), "weigh() returned -1 for client"),
        (weighs(np.full(5, nan)), "weigh() returned nan for client"),
        (weighs(np.full(5, inf)), "weigh() returned inf for client"),
        (weighs(np.ones(1)), f"{ONE_EACH} an"),
        (weighs(None), f"{ONE_EACH} None"),
        (does("weighting", "weigh", lambda a: a.size), "AttributeError: 'Answered' object has no attribute 'size' ("),
        (chooses(3, 1, 3), "select() chose client 3 twice"),
        (chooses(0, 10), "select() chose client 10, and there are clients 0 to 9"),
        (chooses(-1), "select() chose client -1"),
        (chooses(0.5), "must return client ids first, whole numbers and one at least, not [0.5]"),
        (chooses(), "whole numbers and one at least, not []"),
        (does("selection", "select", lambda n, _: np.arange(n)), "must return (client ids, next state), not an array"),
        (does("selection", "select", lambda _, counts: counts[99]), "select() failed: TypeError: 'LabelCounts' object"),
        (does("selection", "select", lambda n, _: (np.arange(n), QUOTAS)), "quotas must be amounts of shape (5, 10)"),
        (does("aggregation", "combine", lambda u, w: (u[:2], w[:2])), "an update for each of the 5 clients, or one"),
        (does("aggregation", "combine", lambda u, w: (u, w * 2)), "returned weights of sum 2; they must sum to 1"),
        (does("aggregation", "combine", lambda u, w: (u, w * nan)), "returned weights of sum nan"),
        (does("aggregation", "combine", lambda u, w: (u / 0 * 0, w)), "combine() returned NaN or infinity, although"),
        (does("aggregation", "combine", lambda u, w: None), "combine() must return (updates, their weights), not None"),
        (does("aggregation", "combine", lambda u, w: 1 / 0), "combine() failed: ZeroDivisionError"),
        (does("server_update", "share", lambda update: (1.5, {})), f"{FACTOR} (1.5, {{}})"),
        (does("server_update", "share", lambda update: (1.0, {"one": nan})), FACTOR),
        (does("server_update", "share", lambda update: 0.5), f"{FACTOR} 0.5"),
        (does("server_update", "share", lambda update: 1 / 0), "share() failed: ZeroDivisionError"),
        (does("server_update", "init", lambda at: at.nothing), "init() failed: AttributeError"),
        (
            does("server_update", "init", lambda at: [at]),
            "its state can't be saved; what it keeps between rounds is tensors",
        ),
        (does("server_update", "move", lambda at: (at / 0, {})), "move() returned NaN or infinity, although the model"),
        (does("server_update", "move", lambda at: at), "move() must return (next model, next state), the model of"),
        (does("server_update", "move", lambda at: (at[:3], {})), "not (a tensor of shape (3,), {})"),
        (does("server_update", "move", lambda at: at[9999]), "move() failed: IndexError: index 9999 is out of bounds"),
    ],
)  # fmt: skip
def test_a_mistake_at_the_server_is_named_with_its_round(mistake, says):
    slot, function, what = mistake
    line = error_of(method={slot: own(**{function: what})})
    named = f"{slot} {__name__}:Own: "
    assert line.startswith(
        (f"ComponentError round 1: {named}", *[f"ComponentError {named}"] * (function in ("share", "init")))
    )
    assert says in line


def test_a_model_in_float64_is_rounded_to_what_clients_train(monkeypatch):
    """The weighted sum of the updates is float64, and so is the model plus that sum."""
    task, wide = TASK | {"training": TASK["training"] | {"rounds": 2}}, own(move=lambda at: (at.double(), {}))
    assert bits(fedskew.simulate(task, method={"server_update": wide})) == bits(fedskew.simulate(task))
    monkeypatch.setattr(Own, "next_model", lambda self, end: end.new.double())
    assert bits(fedskew.simulate(task, method={"server_update": own()})) == bits(fedskew.simulate(task))
    monkeypatch.setattr(Own, "next_model", lambda self, end: end.new.double() + 1e300)
    assert "next_model() must return a finite model" in error_of(method={"server_update": own()})


def test_weights_may_come_as_a_tensor_of_single_precision():
    record = fedskew.simulate(TASK, method={"weighting": own(weigh=lambda answered: torch.full((5,), 0.2))}).rounds[1]
    assert record["weights"] == pytest.approx([0.2] * 5)


class Zeroing(Own):
    def weigh(self, answered, updates):
        updates.zero_()
        return np.full(5, 0.2)


def test_what_a_component_makes_of_its_arrays_is_its_own_affair():
    """Weights of any kind of array are read, those made in place change no record, and votes in whole numbers count."""

    def in_place(answered):
        answered.sizes[:] = answered.target[:] = 0.2
        return answered.sizes

    kinds = np.full(5, 0.2), [0.2] * 5, torch.full((5,), 0.2, dtype=torch.float64)
    weigh = *(own(weigh=lambda answered, kind=kind: kind) for kind in kinds), own(weigh=in_place), Zeroing(0)
    signs = torch.Tensor.sign, torch.Tensor.sign_
    votes = [own(combine=lambda updates, weights, of=of: (of(updates).int(), weights)) for of in signs]
    for slot, some in {"weighting": weigh, "aggregation": votes}.items():
        runs = [fedskew.simulate(TASK, method={slot: one}, target={"mix": [1, *[0] * 9]}) for one in some]
        assert all(bits(run) == bits(runs[0]) for run in runs)


def logarithm_of_0(batch, context):
    """0 times the logarithm of 0 for every class that the client lacks."""
    share = context.counts / context.counts.sum()
    return (share * (share / batch.logits.softmax(1).mean(0)).log()).sum()


def root_of_0(batch, context):
    return (batch.logits - batch.logits.detach()).square().sum().sqrt()


def of(value) -> dict[str, Any]:
    return {"value": value}


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (of(logarithm_of_0), "step 0 (64 samples): objective.terms[0] OWN returns nan, although"),
        (of(root_of_0), "objective.terms[0] OWN returns 0 with a gradient that is NaN or infinite"),
        (of(lambda batch, _: batch.logits.sum() * 0 + nan), "objective.terms[0] OWN returns nan"),
        (of(lambda batch, _: batch.logits.sum(1)), "objective OWN: value() must return one number, a 0-d tensor"),
        (of(lambda batch, _: 0.5), "got float"),
        (of(lambda batch, _: batch.logit), "AttributeError: 'Batch' object has no attribute 'logit' (test_contracts"),
        ({"end_local": lambda end: ({"own": end.parameters / 0}, {})}, "terms[0] OWN returns NaN or infinity as 'own'"),
        ({"end_local": lambda end: {}["no"]}, "terms[0] OWN: end_local() failed: KeyError: 'no' (test_contracts.py"),
        ({"step": lambda after, at: (after / (at - at).norm(), None)}, "OWN returns parameters that are NaN or inf"),
        ({"step": lambda after, _: after}, "OWN: step() must return (next parameters, what it carries by name"),
        ({"step": lambda after, _: (after[:5], None)}, "of shape (650,), not (a tensor of shape (5,), None)"),
    ],
)
def test_a_mistake_in_local_training_is_named_with_client_and_step(backend, mistake, says):
    term = {"preset": "fedlc", "objective": {"extra_terms": [own(**mistake)]}}
    line = error_of(method={"local_step": own(**mistake)} if "step" in mistake else term, engine={"backend": backend})
    assert line.startswith(("ComponentError round 1, client", "RunError round 1, client"))
    assert says.replace("OWN", f"{__name__}:Own") in line
    assert "step" not in mistake or f"local_step {__name__}:Own" in line


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_a_step_that_writes_to_its_parameters_takes_the_same_steps(backend):
    """What was sent is the next client's, too."""
    steps = own(), own(step=lambda after, at: (at.copy_(after), None))
    there, new = (fedskew.simulate(TASK, method={"local_step": one}, engine={"backend": backend}) for one in steps)
    assert bits(there) == bits(new)


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_a_step_that_asks_for_no_gradient_is_told_so(backend, monkeypatch):
    monkeypatch.setattr(Own, "step", lambda self, parameters, gradient, carried, settings: (parameters, carried))
    line = error_of(method={"local_step": own()}, engine={"backend": backend})
    assert line.startswith("ComponentError round 1, client")
    assert "Own.step() never called gradient(parameters); call it once at least" in line


@dataclass(frozen=True)
class Loss(Own):
    """A classification loss."""

    role: ClassVar[str] = "classification"


def test_a_loss_without_a_gradient_or_that_reads_what_is_not_there_is_told_so(monkeypatch):
    loss = Loss(own(value=lambda batch, _: batch.logits.detach().sum()).number)
    assert "the loss depends on no parameter: detach(), item()" in error_of(method={"objective": loss})
    monkeypatch.setattr(Loss, "reads", frozenset({"teachr"}))
    assert "Loss.reads must be a set" in error_of(method={"objective": loss})


HOOKS = ["adapt", "init_server", "broadcast", "init_client", "end_local", "end_round", "next_model", "evaluated"]


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_returns_is_checked(hook, monkeypatch):
    for given in (None, {"own": 1.0}, torch.ones(3)):
        made = (given, {}) if hook == "end_local" else given
        monkeypatch.setattr(Own, hook, lambda *_, made=made: made)
        line = error_of(method={"weighting": own(weigh=lambda answered: np.full(5, 0.2))})
        assert line.startswith("ComponentError ")
        assert f"weighting {__name__}:Own: {hook}() must return" in line
    monkeypatch.setattr(Own, hook, lambda *given: given[99])
    assert f"{hook}() failed: IndexError" in error_of(method={"weighting": own(weigh=lambda answered: np.full(5, 0.2))})


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_too_large_a_learning_rate_is_no_components_fault(backend, monkeypatch):
    training = TASK["training"] | {"lr": 1e38, "rounds": 2}
    method = {"local_step": own(), "objective": {"extra_terms": [own()]}}
    result = fedskew.simulate(TASK | {"training": training}, method=method, engine={"backend": backend})
    assert result.summary["diverged"] > 0
    # Squares of what is finite in float32 need not be.
    monkeypatch.setattr(Own, "evaluated", lambda self, state, parameters: parameters.square())
    for method in ("fedexp", {"weighting": own(weigh=lambda answered: np.full(5, 0.2))}):
        result = fedskew.simulate(TASK | {"training": training | {"lr": 1e36}}, method=method)
        assert result.summary["diverged"] == 0


NAN = own(value=logarithm_of_0)  # made on import, so that other processes know it too


@pytest.mark.slow
def test_a_faulty_component_is_named_by_the_process_backend_too():
    line = error_of(method={"objective": {"extra_terms": [NAN]}}, engine={"backend": "processes", "processes": 1})
    assert f"{__name__}:Own returns nan" in line
