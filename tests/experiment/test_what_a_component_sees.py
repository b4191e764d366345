"""The methods of `examples/components`, each of which shows something that a component may see, by numbers by hand."""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import fedskew
from common import built, round_end, task
from fedskew import methods
from fedskew.aggregation import Aggregation
from fedskew.engine import Assignment, LocalTraining, LocalWork, PartitionedData, Sent, SequentialBackend
from fedskew.errors import ArgumentError, ComponentError, ConfigError
from fedskew.hooks import Hooks
from fedskew.local_steps import SGD, StepSettings
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


SENT = [[0.4, -0.2], [0.1, 0.3]]


def linear() -> FlatModel:
    """A network of two inputs and classes, without bias."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(SENT))
    return FlatModel(layer)


def divergence_slope(weights: Any, x: Any, taught: Any) -> Any:
    """The gradient of the mean KL(taught || softmax(x weights^T)): mean of (probabilities - taught) outer x."""
    logits = x @ weights.T
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return (odds / odds.sum(1, keepdims=True) - taught).T @ x / len(x)


def test_the_next_model_learns_what_the_clients_models_say_together():
    from feddf import FedDF

    network, x = linear(), torch.tensor([[1.0, 0.5], [-0.3, 2.0], [0.2, -1.0]])
    moves = torch.tensor([[0.5, 0.1, -0.2, 0.3], [-0.1, 0.4, 0.6, -0.7]])
    old = network.read()
    end = round_end([{}, {}], old, old + moves.mean(0), changes=moves)
    logged: dict[str, float] = {}
    new = FedDF(steps=1, rate=0.01).next_model(
        end, network, SimpleNamespace(inputs=x, targets=torch.zeros(3)), logged.__setitem__
    )
    models, rows = np.array(SENT) + moves.double().numpy().reshape(2, 2, 2), x.double().numpy()
    odds = np.exp(np.mean([rows @ one.T for one in models], axis=0))
    slope = divergence_slope(models.mean(0), rows, odds / odds.sum(1, keepdims=True))
    # Adam's first step goes by its rate against each sign; of a linear model the mean's logits are the logits' mean
    assert np.abs(slope).max() < 1e-7
    assert float(logged["divergence from the ensemble"]) == pytest.approx(0, abs=1e-6)
    away = end._replace(new=old)
    new = FedDF(steps=1, rate=0.01).next_model(
        away, network, SimpleNamespace(inputs=x, targets=torch.zeros(3)), logged.__setitem__
    )
    slope = divergence_slope(np.array(SENT), rows, odds / odds.sum(1, keepdims=True))
    assert np.abs(slope).min() > 1e-3
    assert (new - old).numpy() == pytest.approx(-0.01 * np.sign(slope).reshape(-1), rel=1e-3)


def test_the_server_distils_on_its_own_samples_and_says_where_it_has_none():
    method = {"server_update": {"name": "feddf:FedDF", "steps": 3}}
    data = {"name": "digits", "validation": 0.1}
    distilled = run(3, method, rounds=2, data=data)
    assert distilled.rounds[2]["logged"]["divergence from the ensemble"] > 0
    with pytest.raises(
        ComponentError, match=r"round 1: server_update feddf:FedDF: next_model\(\) takes samples: the ser"
    ):
        run(3, method)
    with pytest.raises(ConfigError, match="engine.updates: .* reads what each client returned by itself"):
        run(3, method, engine={"updates": "masked"}, data=data)
    assert "samples" in str(methods.sites_refused(built(**method)))


def test_the_gradient_of_the_loss_is_taken_where_that_of_the_term_leads():
    from fedsol import FedSOL

    asked: list[Any] = []

    def gradient(at, part=None):
        asked.append((at.tolist(), part))
        return torch.tensor([3.0, 4.0]) if part == 0 else 2 * at

    settings = StepSettings(torch.zeros(2), 0.5)
    after, _ = FedSOL(rho=10.0).step(torch.tensor([1.0, 2.0]), gradient, {}, settings)
    assert asked == [([1.0, 2.0], 0), (pytest.approx([7.0, 10.0], rel=1e-4), "loss")]
    assert after.tolist() == pytest.approx([1 - 0.5 * 14, 2 - 0.5 * 20], rel=1e-4)


@component
class Parts(SGD):
    """Logs how far the objective's gradient is from that of its parts, added up."""

    def step(self, parameters, gradient, carried, settings, log):
        parts = gradient(parameters, "loss").clone()
        parts = parts + 0.5 * gradient(parameters, 0)
        parts = parts + 0.25 * gradient(parameters, 1)
        whole = gradient(parameters).clone()
        log("apart", (whole - parts).norm() / whole.norm())
        return super().step(parameters, lambda at: whole, carried, settings)


PARTS = {
    "objective": {"terms": [{"name": "fedkd", "weight": 0.5}, {"name": "uniformity", "weight": 0.25}]},
    "local_step": Parts(),
}


@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_the_gradients_of_parts_add_up_to_the_whole_in_every_backend(backend, width):
    model = {"name": "logistic"} if width is None else {"name": "mlp3", "width": width}
    own, plain = (run(3, PARTS | step, backend=backend, model=model).rounds[1] for step in ({}, {"local_step": "sgd"}))
    assert own["logged"]["apart"] < 1e-5
    assert own["loss"] == pytest.approx(plain["loss"], rel=1e-5)  # of the whole, though a part comes first


def test_a_part_that_there_is_not_is_said():
    with pytest.raises(
        ComponentError, match=r"round 1, client \d, step 0 .*gradient\(\.\.\., 0\): the objective has its"
    ):
        run(3, {"local_step": {"name": "fedsol:FedSOL"}})


@pytest.mark.parametrize("backend", ["sequential", "cohort"])
def test_fedsol_trains(backend):
    method = {"local_step": {"name": "fedsol:FedSOL"}, "objective": {"terms": [{"name": "fedkd"}]}}
    record = run(3, method, rounds=2, backend=backend, evaluation={"every": 1}).rounds
    assert record[2]["evaluation"]["accuracy"] > record[0]["evaluation"]["accuracy"]


def test_the_candidates_with_the_largest_losses_train():
    from power_of_choice import PowerOfChoice

    asked: list[int] = []

    def losses(ids):
        asked.extend(ids.tolist())
        return np.array([{0: 0.5, 1: 2.0, 2: 9.0, 3: 1.0, 4: 3.0}[client] for client in ids])

    counts = np.array([[4, 0], [0, 4], [0, 0], [2, 2], [1, 1]])  # client 2 has no sample
    ids, _ = PowerOfChoice(5).select(None, counts, 2, np.random.default_rng(0), losses, lambda name, value: None)
    assert sorted(asked) == [0, 1, 3, 4]
    assert ids.tolist() == [4, 1]


def test_who_has_waited_longest_trains_by_what_the_selection_keeps(tmp_path):
    config = task(7, rounds=4, participation=3 / 7) | {"method": {"selection": {"name": "by_age:ByAge"}}}
    result = fedskew.simulate(config)
    records = result.rounds[1:]
    first, second, third, fourth = (set(record["cohort"]) for record in records)
    (last,) = set(range(7)) - first - second
    assert not first & second
    assert last in third
    assert third - {last} < first  # of age 2, and those of the second round 1
    assert fourth >= first - third  # of age 3
    assert fourth - first < second
    assert [record["logged"]["longest wait"] for record in records] == [1.0, 2.0, 3.0, 3.0]
    result.report(tmp_path / "page.html")
    assert "Logged by the method: longest wait" in (tmp_path / "page.html").read_text()
    pytest.importorskip("pandas")
    assert result.to_frame()["logged.longest wait"].tolist()[1:] == [1.0, 2.0, 3.0, 3.0]  # as trackers have it


def test_candidates_are_asked_for_the_loss_of_the_present_model_and_their_answers_travel():
    method = {"selection": {"name": "power_of_choice:PowerOfChoice", "candidates": 4}}
    config = task(6, rounds=2, participation=0.34, batch_size=64, lr=0.1)
    chosen, drawn = (fedskew.simulate(config | {"method": one}).rounds for one in (method, "fedavg"))
    assert chosen[1]["logged"]["mean loss of candidates"] == pytest.approx(math.log(10), rel=0.2)  # of no knowledge
    model = drawn[1]["bytes_up"] // 2
    for record in chosen[1:]:
        assert len(record["cohort"]) == 2
        assert record["bytes_down"] == (4 + 2) * model
        assert record["bytes_up"] == 2 * model + 4 * 8
    with pytest.raises(ConfigError, match=r"engine.updates: power_of_choice:PowerOfChoice reads what each client"):
        fedskew.simulate(config | {"method": method, "engine": {"updates": "masked"}})
    assert "losses before a round" in str(methods.sites_refused(built(**method)))


@component
class SeesMix:
    """Logs a share of the target's mix."""

    needs_label_counts: ClassVar[bool] = False

    def init(self, counts):
        return None

    def select(self, state, counts, size, rng, target, log):
        log("share of 3", -1.0 if target is None else target[3])
        return np.arange(size), None


def test_a_selection_may_see_the_targets_mix_and_fedentopt_towards_it_needs_one():
    target = {"target": {"mix": [*range(10)]}}
    records = run(4, {"selection": SeesMix()}, **target).rounds[1], run(4, {"selection": SeesMix()}).rounds[1]
    assert [one["logged"]["share of 3"] for one in records] == pytest.approx([3 / 45, -1.0])
    target = {"target": {"mix": [50, 50, 10, 10, 10, 5, 5, 2, 2, 1]}}
    config = task(30, beta=0.1, rounds=3, participation=0.2, batch_size=64) | target
    choices = ({"name": name, "buffer": 0.0} for name in ("fedentopt_target", "fedentopt"))
    near, even = (fedskew.simulate(config | {"method": {"selection": one}}).rounds[1:] for one in choices)
    assert all(one["target_distance"] < 0.3 * other["target_distance"] for one, other in zip(near, even, strict=True))
    with pytest.raises(
        ArgumentError, match="target: FedEntOptTarget goes towards a target label mix, and none is given"
    ):
        run(4, {"selection": "fedentopt_target"})


def test_losses_are_the_mean_objective_over_a_clients_samples():
    x, y = torch.randn(7, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    counts = np.array([[2.0, 2.0], [2.0, 1.0]])
    data = PartitionedData(x, y, [np.arange(4), np.arange(4, 7)], counts)
    network = linear()
    work = LocalWork(data, built().objective, built().local_step, LocalTraining(), seed=0)
    state, tasks = network.read_state(), [Assignment(1, 1), Assignment(0, 1)]
    found = SequentialBackend(network, work).ask_losses(1, tasks, Sent(state))
    logits = x @ torch.tensor(SENT).T
    expected = [float(nn.functional.cross_entropy(logits[rows], y[rows])) for rows in (slice(4, 7), slice(4))]
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_sampler_of_ones_own_draws_by_the_roots_of_the_counts():
    from root_sampler import by_roots

    labels, counts = np.repeat([0, 1], [900, 100]), np.array([900.0, 100.0, 0.0])
    rows = by_roots(labels, counts, np.random.default_rng(0))
    assert len(rows) == 1000
    share = (labels[rows] == 1).mean()  # 10 / (30 + 10)
    assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 1000))


def test_a_sampler_of_ones_own_is_taken_by_every_backend_and_named_in_a_mistake():
    data = PartitionedData(
        torch.zeros(5, 1), torch.tensor([1, 0, 1, 1, 0]), [np.array([4, 2, 0])], np.array([[1.0, 2.0]])
    )
    training = LocalTraining(batch_size=2, sampler=f"{__name__}:backwards")
    work = LocalWork(data, built().objective, built().local_step, training, seed=0)
    orders = list(work.epoch_orders(1, 0, data.of(0), data.of(0).rows, 2))
    assert [order.tolist() for order in orders] == [[0, 2, 4]] * 2
    config = task(3, rounds=1, batch_size=64, sampler="root_sampler:by_roots")
    one, other = (fedskew.simulate(config | {"engine": {"backend": name}}).model for name in ("sequential", "cohort"))
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-5)
    for sampler, said in (
        (
            f"{__name__}:too_few",
            r"sampler .*too_few: must return a row for each of .* \(\d+\), whole numbers from 0 to \d+",
        ),
        (f"{__name__}:fails", "sampler .*fails: failed: ZeroDivisionError"),
        ("balance", "training.sampler: unknown name 'balance' .*balanced"),
    ):
        with pytest.raises((ComponentError, ConfigError), match=said):
            fedskew.simulate(task(3, rounds=1, sampler=sampler))


def backwards(labels, counts, rng):
    assert labels.tolist() == [0, 1, 1]
    assert counts.tolist() == [1, 2]
    return np.arange(len(labels))[::-1]


def too_few(labels, counts, rng):
    return [0]


def fails(labels, counts, rng):
    return 1 / 0


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
