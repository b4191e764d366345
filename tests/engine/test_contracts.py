"""What components of a user's own return is checked: a mistake is one line that names the component and the place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True)
class Weights:
    """A weighting that returns what it is told to."""

    what: str

    def weigh(self, answered):
        clients = len(answered.ids)
        if self.what == "misspelt":
            return answered.size / 3
        return {
            "sum": np.ones(clients),
            "negative": np.array([2.0, -1.0, 0.0, 0.0, 0.0]),
            "nan": np.full(clients, np.nan),
            "infinite": np.full(clients, np.inf),
            "one": np.ones(1),
            "nothing": None,
            "a list": [0.2] * clients,
            "a tensor": torch.full((clients,), 0.2),
        }[self.what]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("sum", "returned weights of sum 5; they must sum to 1"),
        ("negative", "returned -1 for client"),
        ("nan", "returned nan for client"),
        ("infinite", "returned inf for client"),
        ("one", "must return one weight for each of the 5 clients that replied, not an array of shape (1,)"),
        ("nothing", "one weight for each of the 5 clients that replied, not None"),
        ("misspelt", "failed: AttributeError: 'Answered' object has no attribute 'size' (test_contracts.py, line "),
    ],
)
def test_weights_are_finite_not_negative_and_sum_to_1(what, says):
    line = error_of(method={"weighting": Weights(what)})
    assert line.startswith(f"ComponentError round 1: weighting {__name__}:Weights: weigh() ")
    assert says in line


@pytest.mark.parametrize("what", ["a list", "a tensor"])
def test_weights_may_come_in_any_kind_of_array(what):
    record = fedskew.simulate(TASK, method={"weighting": Weights(what)}).rounds[1]
    assert record["weights"] == pytest.approx([0.2] * 5)


@dataclass(frozen=True)
class Chosen:
    """A selection that chooses what it is told to."""

    what: str
    quotas: tuple = ()

    def init(self, counts):
        return None

    def select(self, state, counts, size, rng, first=None):
        if self.what == "no state":
            return np.arange(size)
        if self.what == "out of range":
            return counts[99], state
        if self.what == "quotas":
            return np.arange(size), Quotas(-np.ones((size, 10)))
        return {"twice": [3, 1, 3], "outside": [0, 10], "negative": [-1], "floats": [0.5], "nobody": []}[
            self.what
        ], state


@dataclass(frozen=True)
class Quotas:
    """A state with quotas."""

    quotas: np.ndarray


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("twice", "select() chose client 3 twice"),
        ("outside", "select() chose client 10, and there are clients 0 to 9"),
        ("negative", "select() chose client -1"),
        ("floats", "must return client ids first, whole numbers and one at least, not [0.5]"),
        ("nobody", "whole numbers and one at least, not []"),
        ("no state", "must return (client ids, next state), not an array of shape (5,)"),
        (
            "out of range",
            "select() failed: TypeError: 'LabelCounts' object is not subscriptable (test_contracts.py, line",
        ),
        ("quotas", "quotas must be amounts of shape (5, 10)"),
    ],
)
def test_chosen_clients_are_distinct_ids_of_the_pool(what, says):
    line = error_of(method={"selection": Chosen(what)})
    assert line.startswith(f"ComponentError round 1: selection {__name__}:Chosen: ")
    assert says in line


@dataclass(frozen=True)
class Term(Hooks):
    """A term with one mistake."""

    what: str
    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()

    def value(self, batch, context):
        if self.what == "nan":  # 0 times the logarithm of 0 for every class that the client lacks
            share = context.counts / context.counts.sum()
            return (share * (share / batch.logits.softmax(1).mean(0)).log()).sum()
        if self.what == "gradient":
            return (batch.logits - batch.logits.detach()).square().sum().sqrt()
        if self.what == "loss":
            return batch.logits.sum() * 0 + float("nan")
        if self.what == "misspelt":
            return batch.logit.sum()
        if self.what == "rows":
            return batch.logits.sum(1)
        return 0.5 if self.what == "number" else batch.logits.square().mean()

    def end_local(self, end):
        if self.what == "hook":
            return {"term.own": end.parameters / 0}, {}
        return {}[self.what] if self.what == "hook fails" else ({}, {})


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nan", "step 0 (64 samples): objective.terms[0] NAME:Term returns nan, although"),
        ("gradient", "objective.terms[0] NAME:Term returns 0 with a gradient that is NaN or infinite"),
        ("loss", "objective.terms[0] NAME:Term returns nan"),
        ("hook", "objective.terms[0] NAME:Term returns NaN or infinity as 'term.own'"),
        ("hook fails", "objective.terms[0] NAME:Term: end_local() failed: KeyError: 'hook fails' (test_contracts.py"),
        ("rows", "objective NAME:Term: value() must return one number, a 0-d tensor, the mean over the real rows; got"),
        ("number", "got float"),
        (
            "misspelt",
            "local training failed: AttributeError: 'Batch' object has no attribute 'logit' (test_contracts.py",
        ),
    ],
)
def test_a_term_that_returns_what_is_no_number_is_named_with_client_and_step(backend, what, says):
    line = error_of(method={"preset": "fedlc", "objective": {"extra_terms": [Term(what)]}}, engine={"backend": backend})
    assert line.startswith(("ComponentError round 1, client", "RunError round 1, client"))
    assert says.replace("NAME", __name__) in line


@dataclass(frozen=True)
class Step:
    """A local step with one mistake."""

    what: str

    def init(self, settings):
        return None

    def step(self, parameters, gradient, carried, settings):
        following = parameters - settings.lr * gradient(parameters)
        if self.what == "nan":
            following = following / (parameters - parameters).norm()
        return following if self.what == "alone" else (following[:5] if self.what == "short" else following, None)


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nan", "returns parameters that are NaN or infinite"),
        ("alone", "must return (next parameters, what it carries by name or None), the parameters of shape (650,)"),
        ("short", "not (a tensor of shape (5,), None)"),
    ],
)
def test_a_local_step_that_returns_no_parameters_is_named(backend, what, says):
    line = error_of(method={"local_step": Step(what)}, engine={"backend": backend})
    assert line.startswith("ComponentError round 1, client")
    assert f"local_step {__name__}:Step" in line
    assert says in line


@dataclass(frozen=True)
class Update:
    """A server update with one mistake."""

    what: str

    def init(self, parameters):
        if self.what == "init fails":
            return parameters.nothing
        return [parameters] if self.what == "list" else None

    def move(self, state, parameters, change, extras):
        following = (parameters + change).to(parameters.dtype)
        if self.what == "fails":
            return change[9999], state
        return following if self.what == "alone" else (following / 0 if self.what == "nan" else following[:3], state)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nan", "move() returned NaN or infinity, although the model and all updates are finite"),
        ("alone", "move() must return (next model, next state), the model of shape (650,), not a tensor"),
        ("short", "not (a tensor of shape (3,), {})"),
        ("fails", "move() failed: IndexError: index 9999 is out of bounds"),
    ],
)
def test_a_server_update_that_returns_no_model_is_named(what, says):
    line = error_of(method={"server_update": Update(what)})
    assert line.startswith(f"ComponentError round 1: server_update {__name__}:Update: ")
    assert says in line


def test_a_state_that_cannot_be_made_or_saved_is_named(tmp_path):
    line = error_of(method={"server_update": Update("init fails")})
    assert f"server_update {__name__}:Update: init() failed: AttributeError" in line
    line = error_of(method={"server_update": Update("list")})
    assert f"server_update {__name__}:Update: its state can't be saved; what it keeps between rounds is tensors" in line


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_too_large_a_learning_rate_is_no_components_fault(backend):
    training = TASK["training"] | {"lr": 1e38, "rounds": 2}
    method = {"local_step": Step("fine"), "objective": {"extra_terms": [Term("fine")]}}
    result = fedskew.simulate(TASK | {"training": training}, method=method, engine={"backend": backend})
    assert result.summary["diverged"] > 0


@pytest.mark.slow
def test_a_faulty_component_is_named_by_the_process_backend_too():
    method = {"objective": {"extra_terms": [Term("nan")]}}
    line = error_of(method=method, engine={"backend": "processes", "processes": 1})
    assert f"{__name__}:Term returns nan" in line


def test_a_component_error_is_one_of_a_run():
    assert issubclass(ComponentError, fedskew.errors.RunError)
