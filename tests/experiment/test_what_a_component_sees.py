"""The methods of `examples/components`, each of which shows something that a component may see, by numbers by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from common import task
from fedskew.aggregation import Aggregation
from fedskew.errors import ComponentError, ConfigError
from fedskew.hooks import Hooks
from fedskew.local_steps import SGD
from fedskew.models import FlatModel
from fedskew.parameters import component

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "components"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(clients: int, method: Any, rounds: int = 1, backend: str = "sequential", **more: Any) -> Any:
    """Rounds in which all clients train, on the digits."""
    config = task(clients, rounds=rounds, participation=1.0, batch_size=64, lr=0.1)
    engine = {"backend": backend, "processes": 2} if backend == "processes" else {"backend": backend}
    return fedskew.simulate(config | {"engine": engine, "method": method} | more)


def test_each_layer_counts_by_the_cosine_of_its_angle_to_the_sent_one():
    from ldawa import LDAWA

    layout = FlatModel(nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))).layout
    assert layout.slices == {
        "0.weight": slice(0, 2),
        "0.bias": slice(2, 3),
        "1.weight": slice(3, 4),
        "1.bias": slice(4, 5),
    }
    assert layout.layers == {"0": slice(0, 3), "1": slice(3, 5)}
    assert layout.views(torch.arange(5.0))["0.weight"].tolist() == [[0.0, 1.0]]
    sent = torch.tensor([3.0, 4.0, 0.0, 1.0, 0.0])
    # cosines 1 and 1; 0 and 0; -1 and 1 / sqrt 2
    models = torch.tensor([[3.0, 4.0, 0.0, 1.0, 0.0], [4.0, -3.0, 0.0, 0.0, 2.0], [-6.0, -8.0, 0.0, 1.0, 1.0]])
    logged: dict[str, float] = {}
    rows, weights = LDAWA().combine(models - sent, np.array([0.5, 0.25, 0.25]), sent, layout, logged.__setitem__)
    root = math.sqrt(0.5)
    expected = [0.5 * 3 + 0.25 * 6, 0.5 * 4 + 0.25 * 8, 0.0, 0.5 + 0.25 * root, 0.25 * root]
    assert (sent + rows[0]).tolist() == pytest.approx(expected)
    assert weights.tolist() == [1.0]
    assert float(logged["cosine 0"]) == pytest.approx(0.0, abs=1e-12)
    assert float(logged["cosine 1"]) == pytest.approx((1 + root) / 3)


def test_a_layer_of_zeros_counts_in_full():
    from ldawa import LDAWA

    layout = FlatModel(nn.Linear(2, 1)).layout
    moves = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    rows, _ = LDAWA().combine(moves, np.array([0.5, 0.5]), torch.zeros(3), layout, lambda name, value: None)
    assert rows.tolist() == [[2.0, 2.0, 2.0]]


def test_a_federation_of_one_client_shrinks_its_layer_by_the_cosine_that_is_logged():
    plain, aware = run(1, "fedavg"), run(1, {"aggregation": {"name": "ldawa:LDAWA"}})
    (cosine,) = aware.rounds[1]["logged"].values()
    assert 0 < cosine < 1
    for one, other in zip(plain.model.parameters(), aware.model.parameters(), strict=True):
        torch.testing.assert_close(other, cosine * one)
    assert "logged" not in plain.rounds[1]


# ---- figures that components log, and what they keep


@component
class Loud(SGD):
    """SGD that logs at every step."""

    def step(self, parameters, gradient, carried, settings, layout, log):
        direction = gradient(parameters)
        log("head", layout.views(direction)["head.weight"].norm())
        log("one", 1)
        return super().step(parameters, lambda at: direction, carried, settings)


@component
class Confident:
    """A term whose value is logged."""

    role: ClassVar[str] = "term"
    reads: ClassVar[frozenset[str]] = frozenset()

    def value(self, batch, context, log):
        surest = batch.logits.softmax(1).amax(1)
        rows = torch.ones_like(surest) if batch.mask is None else batch.mask.to(surest.dtype)
        mean = (surest * rows).sum() / rows.sum()
        log("confidence", mean)
        return mean


@dataclass(frozen=True)
class Kept(Hooks):
    """Selects everybody, and counts rounds in what it keeps."""

    needs_label_counts: ClassVar[bool] = False

    def init(self, counts):
        return None

    def init_server(self, parameters, clients):
        return {"rounds": torch.zeros(())}

    def select(self, state, counts, size, rng, kept, log):
        log("rounds before", kept["rounds"])
        return np.arange(size), state

    def end_round(self, state, end, log):
        log("infinite", math.inf)
        return {"rounds": state["rounds"] + 1}


@component
class Counting(Aggregation, Hooks):
    """The mean, and what it keeps."""

    def init_server(self, parameters, clients):
        return {"clients": torch.tensor(clients)}

    def combine(self, updates, weights, kept, log):
        log("clients", kept["clients"])
        return updates, weights


UNEVEN = {"rule": "dirichlet_by_class", "beta": 0.5, "clients": 4}
LOUD = {
    "selection": Kept(),
    "objective": {"extra_terms": [{"name": f"{__name__}:Confident", "weight": 0.1}]},
    "local_step": Loud(),
    "aggregation": Counting(),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cohort", "processes"])
def test_figures_are_logged_alike_by_every_backend(backend):
    alone, other = run(5, LOUD, rounds=2), run(5, LOUD, rounds=2, backend=backend)
    for one, two in zip(alone.rounds[1:], other.rounds[1:], strict=True):
        assert one["logged"].pop("infinite", 0.0) is two["logged"].pop("infinite", 0.0) is None
        assert one["logged"] == pytest.approx(two["logged"], rel=1e-4 if backend == "cohort" else 0)
    first, second = (record["logged"] for record in alone.rounds[1:])
    assert list(first) == ["confidence", "head", "one", "rounds before", "clients"]
    assert (first["one"], first["rounds before"], second["rounds before"], first["clients"]) == (1.0, 0.0, 1.0, 5.0)
    assert 0.1 < first["confidence"] < 1


@component
class Stepping(SGD):
    """Logs 1, 2, 3, ... at the steps of a client."""

    def init(self, settings):
        return {"taken": torch.zeros(())}

    def step(self, parameters, gradient, carried, settings, log):
        log("step", carried["taken"] + 1)
        return parameters - settings.lr * gradient(parameters), {"taken": carried["taken"] + 1}


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_a_clients_figure_is_the_mean_over_its_steps_and_then_over_clients(backend):
    record = run(4, {"local_step": Stepping()}, backend=backend, partition=UNEVEN).rounds[1]
    assert len(set(record["steps"])) > 1
    assert record["logged"] == {"step": pytest.approx(np.mean([(steps + 1) / 2 for steps in record["steps"]]))}


def test_figures_of_clients_stay_there_where_updates_are_masked():
    assert "logged" not in run(5, {"local_step": Loud()}, engine={"updates": "masked"}).rounds[1]


@component
class ByLength:
    """Weights by the lengths of updates."""

    needs_label_counts: ClassVar[bool] = False

    def weigh(self, answered, updates, sent, layout):
        assert updates.shape == (len(answered.ids), len(sent))
        assert set(layout.slices) == {"head.weight", "head.bias"}
        lengths = updates.double().norm(dim=1).numpy()
        return lengths / lengths.sum()


def test_a_weighting_may_see_updates_and_the_sent_model():
    weights = run(4, {"weighting": ByLength()}).rounds[1]["weights"]
    assert sum(weights) == pytest.approx(1)
    assert len(set(weights)) == 4
    with pytest.raises(ConfigError, match=r"engine.updates: .*ByLength reads what each client returned"):
        run(4, {"weighting": ByLength()}, engine={"updates": "masked"})


@component
class Wrong:
    """A misspelt parameter."""

    def weigh(self, answered, sents):
        return answered.sizes


@component
class Unreadable:
    """A figure that is none."""

    def weigh(self, answered, log):
        log("sizes", answered.sizes)
        return answered.sizes / answered.sizes.sum()


@pytest.mark.parametrize(
    ("weighting", "said"),
    [
        (
            Wrong(),
            r"method.weighting: Wrong.weigh\(answered, sents\) is called as weigh\(answered\), after self; it may",
        ),
        (
            Unreadable(),
            r"round 1: weighting .*Unreadable: weigh\(\) failed: .*log\('sizes', ...\): expected a name and one num",
        ),
    ],
)
def test_what_a_component_asks_for_wrongly_is_said_in_a_line(weighting, said):
    with pytest.raises((ConfigError, ComponentError), match=said):
        run(3, {"weighting": weighting})
