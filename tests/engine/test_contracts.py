"""What components of a user's own return is checked: a mistake is one line that names the component and the place."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import fedskew
from fedskew.errors import ComponentError, FedskewError
from fedskew.hooks import Hooks

TASK = {
    "data": "digits",
    "partition": {"rule": "quantity", "clients": 10, "labels_per_client": 3},
    "model": "logistic",
    "training": {"rounds": 1, "participation": 0.5, "lr": 0.05},
}


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
class Own(Hooks):
    """A component of any kind, with the mistakes of this number."""

    number: int
    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()

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

    def move(self, state, parameters, change, extras):
        following = (parameters + change).to(parameters.dtype)
        return self.does("move", (following, state), following)


def weights(values):
    return {"weigh": lambda answered: values}


def chosen(*ids):
    return {"select": lambda size, counts: (list(ids), None)}


@pytest.mark.parametrize(
    ("slot", "mistake", "says"),
    [
        ("weighting", weights(np.ones(5)), "weigh() returned weights of sum 5; they must sum to 1"),
        ("weighting", weights(np.array([2.0, -1, 0, 0, 0])), "weigh() returned -1 for client"),
        ("weighting", weights(np.full(5, np.nan)), "weigh() returned nan for client"),
        ("weighting", weights(np.full(5, np.inf)), "weigh() returned inf for client"),
        (
            "weighting",
            weights(np.ones(1)),
            "weigh() must return one weight for each of the 5 clients that replied, not an",
        ),
        ("weighting", weights(None), "one weight for each of the 5 clients that replied, not None"),
        (
            "weighting",
            {"weigh": lambda a: a.size},
            "failed: AttributeError: 'Answered' object has no attribute 'size' (test",
        ),
        ("selection", chosen(3, 1, 3), "select() chose client 3 twice"),
        ("selection", chosen(0, 10), "select() chose client 10, and there are clients 0 to 9"),
        ("selection", chosen(-1), "select() chose client -1"),
        ("selection", chosen(0.5), "must return client ids first, whole numbers and one at least, not [0.5]"),
        ("selection", chosen(), "whole numbers and one at least, not []"),
        (
            "selection",
            {"select": lambda size, _: np.arange(size)},
            "must return (client ids, next state), not an array of",
        ),
        (
            "selection",
            {"select": lambda _, counts: counts[99]},
            "select() failed: TypeError: 'LabelCounts' object is not",
        ),
        (
            "selection",
            {"select": lambda size, _: (np.arange(size), SimpleNamespace(quotas=-np.ones((size, 10))))},
            "quotas must be amounts of shape (5, 10)",
        ),
        (
            "server_update",
            {"move": lambda model: (model / 0, {})},
            "move() returned NaN or infinity, although the model and",
        ),
        (
            "server_update",
            {"move": lambda model: model},
            "move() must return (next model, next state), the model of shape (650",
        ),
        ("server_update", {"move": lambda model: (model[:3], {})}, "not (a tensor of shape (3,), {})"),
        (
            "server_update",
            {"move": lambda model: model[9999]},
            "move() failed: IndexError: index 9999 is out of bounds",
        ),
    ],
)
def test_a_mistake_at_the_server_is_named_with_its_round(slot, mistake, says):
    line = error_of(method={slot: own(**mistake)})
    assert line.startswith(f"ComponentError round 1: {slot} {__name__}:Own: ")
    assert says in line


@pytest.mark.parametrize("given", [[0.2] * 5, torch.full((5,), 0.2)], ids=["a list", "a tensor"])
def test_weights_may_come_in_any_kind_of_array(given):
    record = fedskew.simulate(TASK, method={"weighting": own(**weights(given))}).rounds[1]
    assert record["weights"] == pytest.approx([0.2] * 5)


def logarithm_of_0(batch, context):
    """0 times the logarithm of 0 for every class that the client lacks."""
    share = context.counts / context.counts.sum()
    return (share * (share / batch.logits.softmax(1).mean(0)).log()).sum()


def root_of_0(batch, context):
    return (batch.logits - batch.logits.detach()).square().sum().sqrt()


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ({"value": logarithm_of_0}, "step 0 (64 samples): objective.terms[0] OWN returns nan, although"),
        ({"value": root_of_0}, "objective.terms[0] OWN returns 0 with a gradient that is NaN or infinite"),
        ({"value": lambda batch, _: batch.logits.sum() * 0 + float("nan")}, "objective.terms[0] OWN returns nan"),
        (
            {"value": lambda batch, _: batch.logits.sum(1)},
            "objective OWN: value() must return one number, a 0-d tensor",
        ),
        ({"value": lambda batch, _: 0.5}, "got float"),
        (
            {"value": lambda batch, _: batch.logit},
            "AttributeError: 'Batch' object has no attribute 'logit' (test_contracts",
        ),
        ({"end_local": lambda end: ({"own": end.parameters / 0}, {})}, "terms[0] OWN returns NaN or infinity as 'own'"),
        ({"end_local": lambda end: {}["no"]}, "terms[0] OWN: end_local() failed: KeyError: 'no' (test_contracts.py"),
        (
            {"step": lambda after, at: (after / (at - at).norm(), None)},
            "OWN returns parameters that are NaN or infinite",
        ),
        (
            {"step": lambda after, _: after},
            "OWN: step() must return (next parameters, what it carries by name or None), ",
        ),
        ({"step": lambda after, _: (after[:5], None)}, "of shape (650,), not (a tensor of shape (5,), None)"),
    ],
)
def test_a_mistake_in_local_training_is_named_with_client_and_step(backend, mistake, says):
    term = {"preset": "fedlc", "objective": {"extra_terms": [own(**mistake)]}}
    line = error_of(method={"local_step": own(**mistake)} if "step" in mistake else term, engine={"backend": backend})
    assert line.startswith(("ComponentError round 1, client", "RunError round 1, client"))
    assert says.replace("OWN", f"{__name__}:Own") in line
    assert "step" not in mistake or f"local_step {__name__}:Own" in line


def test_a_state_that_cannot_be_made_or_saved_is_named():
    line = error_of(method={"server_update": own(init=lambda parameters: parameters.nothing)})
    assert f"server_update {__name__}:Own: init() failed: AttributeError" in line
    line = error_of(method={"server_update": own(init=lambda parameters: [parameters])})
    assert f"server_update {__name__}:Own: its state can't be saved; what it keeps between rounds is tensors" in line


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_too_large_a_learning_rate_is_no_components_fault(backend):
    training = TASK["training"] | {"lr": 1e38, "rounds": 2}
    method = {"local_step": own(), "objective": {"extra_terms": [own()]}}
    result = fedskew.simulate(TASK | {"training": training}, method=method, engine={"backend": backend})
    assert result.summary["diverged"] > 0


NAN = own(value=logarithm_of_0)  # made on import, so that other processes know it too


@pytest.mark.slow
def test_a_faulty_component_is_named_by_the_process_backend_too():
    line = error_of(method={"objective": {"extra_terms": [NAN]}}, engine={"backend": "processes", "processes": 1})
    assert f"{__name__}:Own returns nan" in line


def test_a_component_error_is_one_of_a_run():
    assert issubclass(ComponentError, fedskew.errors.RunError)
