"""What an existing Flower project changes to use a method: two lines on its server, or its ClientApp."""

import importlib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import NAMES, Federated, LocalGrid, Tamper, federate, on, silent_on, tree
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

from fedskew import deploy, weighting
from fedskew.deploy import SiteData, client_app, strategy
from fedskew.engine import LocalTraining
from fedskew.errors import ConfigError


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def first_arrays() -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(network().state_dict())


def reader(federation: Federated) -> Callable[[Context], SiteData]:
    return lambda context: SiteData.load(Path(str(context.node_config["data"])), federation.agreement)


def project(federation: Federated) -> ClientApp:
    """A ClientApp as Flower's users write them: it knows nothing of us, but answers a query with its label counts."""
    app, samples = ClientApp(), reader(federation)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, held = network(), samples(context)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=float(message.content["config"]["lr"]))
        loss = functional.cross_entropy(model(held.inputs), held.targets)
        loss.backward()
        optimizer.step()
        metrics = {"train_loss": loss.item(), "num-examples": len(held.targets)}
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, held = network(), samples(context)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        right = model(held.test_inputs).argmax(1) == held.test_targets
        metrics = {"accuracy": float(right.float().mean()), "num-examples": len(right)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        counts = samples(context).counts.astype(int).tolist()
        return Message(RecordDict({"metrics": MetricRecord({"label-counts": counts})}), reply_to=message)

    return app


def with_app(grid: LocalGrid, app: ClientApp) -> LocalGrid:
    grid.apps = {node: (name, app, settings) for node, (name, _, settings) in grid.apps.items()}
    return grid


def stock(federation: Federated, lies: Mapping[str, Tamper] | None = None) -> LocalGrid:
    return with_app(federation.grid(lies), project(federation))


def ours(federation: Federated, method: str) -> LocalGrid:
    """The same clients by fedskew's own ClientApp."""
    training = LocalTraining(lr=0.1)
    return with_app(federation.grid(), client_app(network, reader(federation), method, training=training))


@pytest.fixture
def federation(tmp_path: Path) -> Federated:
    return federate(tmp_path, tree("fedavg"))


def start(grid: LocalGrid, chosen: Any, rounds: int = 2) -> Any:
    config = ConfigRecord({"lr": 0.5})
    return chosen.start(grid=grid, initial_arrays=first_arrays(), num_rounds=rounds, timeout=5, train_config=config)


def test_a_stock_project_weighs_by_fedavg_as_it_did_before(federation: Federated) -> None:
    before = start(stock(federation), FedAvg())
    after = start(stock(federation), strategy("fedavg"))
    for name, array in before.arrays.items():
        np.testing.assert_allclose(after.arrays[name].numpy(), array.numpy(), rtol=1e-5, atol=1e-6)
    assert after.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(
        before.evaluate_metrics_clientapp[2]["accuracy"]
    )


def test_a_stock_project_takes_a_selection_and_a_weighting_by_two_lines(federation: Federated) -> None:
    grid = stock(federation)
    chosen = strategy("fedentopt+fedla", participation=0.67)
    start(grid, chosen, rounds=3)
    counts = np.array([SiteData.load(federation.data_of(name), federation.agreement).counts for name in NAMES])
    record = chosen.record
    assert len(record["cohort"]) == 2
    np.testing.assert_allclose(record["weights"], weighting.fedla(counts[record["answered"]]), rtol=1e-9)
    assert [message.metadata.message_type for message in grid.asked][:3] == ["query"] * 3


def test_a_pattern_says_which_nodes_take_part(federation: Federated) -> None:
    grid = stock(federation)
    chosen = strategy("fedentopt+fedla", participation=0.5, nodes=[f"{NAMES[0]}*", NAMES[2]])
    start(grid, chosen)
    assert {*map(grid.name_of, grid.asked)} == {NAMES[0], NAMES[2]}  # queries and evaluations too
    assert len(chosen.record["cohort"]) == 1  # half of the two
    by_id = strategy("fedavg", nodes="*", min_nodes=len(NAMES))
    start(stock(federation), by_id, rounds=1)
    assert len(by_id.record["answered"]) == len(NAMES)


def test_nodes_that_are_too_few_are_waited_for_and_said(
    federation: Federated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = stock(federation)

    def come_online(_: float) -> None:
        node = 1000
        grid.apps[node] = ("late-1", *next(iter(grid.apps.values()))[1:])

    monkeypatch.setattr("time.sleep", come_online)
    chosen = strategy("fedavg", nodes="late-*", min_nodes=1)
    with caplog.at_level("INFO"):
        start(grid, chosen, rounds=1)
    said = f"waiting for nodes: 0 of 1, of {len(NAMES)} connected, whose names fit late-*"
    assert said in [record.getMessage() for record in caplog.records]
    assert chosen.record["answered"] == [0]


@pytest.mark.parametrize("nodes", ["", [], ["a", 3]])
def test_nodes_that_are_no_patterns_are_refused(nodes: Any) -> None:
    with pytest.raises(ConfigError, match="nodes: expected a pattern of names"):
        strategy("fedavg", nodes=nodes)


@pytest.mark.slow
def test_an_objective_comes_with_our_client_app_under_stock_fedavg(federation: Federated) -> None:
    results = [start(ours(federation, method), FedAvg()) for method in ("fedavg", "fedvls", "fedlc")]
    assert [result.evaluate_metrics_clientapp[2]["accuracy"] > 0.2 for result in results] == [True] * 3
    weights = [result.arrays["1.weight"].numpy() for result in results]
    assert not np.allclose(weights[0], weights[1])
    assert not np.allclose(weights[0], weights[2])


def test_noisy_counts_of_a_project_are_released_once_and_the_exact_ones_told_nowhere(federation: Federated) -> None:
    pytest.importorskip("opendp")
    told: list[list[float]] = []

    def listen(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "query":
            told.append(answer.content["metrics"]["label-counts"])
        elif question.metadata.message_type == "train":
            assert "num-examples" not in answer.content["metrics"]
        return answer

    for epsilon in (0.5, 50.0):  # one that asks again learns no more, whatever the epsilon
        noisy = client_app(network, reader(federation), label_counts="noisy", epsilon=epsilon)
        grid = with_app(federation.grid({NAMES[0]: listen}), noisy)
        assert start(grid, strategy("fedla", model=network())).train_metrics_clientapp[2]["counted"] == 3
    exact = SiteData.load(federation.data_of(NAMES[0]), federation.agreement).counts
    assert told[0] == told[1]
    assert np.abs(np.array(told[0]) - exact).max() > 1e-6


@pytest.mark.parametrize("lacks", ["epsilon", "state"])
def test_noisy_counts_take_an_epsilon_and_a_folder(federation: Federated, lacks: str, caplog: Any) -> None:
    def read(context: Context) -> SiteData:
        return replace(reader(federation)(context), **({"state": None} if lacks == "state" else {}))

    app = client_app(network, read, label_counts="noisy", epsilon=None if lacks == "epsilon" else 1.0)
    with pytest.raises(ConfigError, match="no client reported them"):
        start(with_app(federation.grid(), app), strategy("fedla", min_nodes=3, model=network()), rounds=1)
    assert "noisy counts need epsilon, and a folder where the release is stored" in caplog.text


@pytest.mark.slow
def test_scaffold_needs_both_sides_and_says_so(federation: Federated) -> None:
    both = start(ours(federation, "scaffold"), strategy("scaffold", model=network()), rounds=3)
    assert both.train_metrics_clientapp[3]["counted"] == 3
    theirs = start(stock(federation), strategy("scaffold", model=network()))
    assert theirs.train_metrics_clientapp[2]["counted"] == 0
    np.testing.assert_array_equal(theirs.arrays["1.weight"].numpy(), first_arrays()["1.weight"].numpy())
    with pytest.raises(ConfigError, match="model: Scaffold needs the network"):
        strategy("scaffold")


def test_fedacg_evaluates_and_returns_the_model_without_momentum_and_sends_the_one_with_it(
    federation: Federated,
) -> None:
    grid = stock(federation)
    found = start(grid, strategy("fedacg"), rounds=2)
    first = first_arrays()["1.weight"].numpy()
    plain = start(stock(federation), strategy("fedavg"), rounds=1)
    mean = plain.arrays["1.weight"].numpy()  # after one round FedACG's w is FedAvg's model

    def sent(kind: str) -> list[np.ndarray]:
        return [grid.questions(kind)[at].content["arrays"]["1.weight"].numpy() for at in (0, 3)]

    trained, evaluated = sent("train"), sent("evaluate")
    np.testing.assert_array_equal(trained[0], first)
    np.testing.assert_allclose(evaluated[0], mean, atol=1e-6)
    np.testing.assert_allclose(trained[1], mean + 0.85 * (mean - first), atol=1e-6)
    np.testing.assert_array_equal(found.arrays["1.weight"].numpy(), evaluated[1])


@pytest.mark.slow
def test_each_half_of_feddyn_refuses_a_stock_other_half(federation: Federated, caplog: Any) -> None:
    start(ours(federation, "feddyn"), FedAvg(), rounds=1)
    said = [entry.message for entry in caplog.records if "method: FedDyn is one half" in entry.message]
    assert len(said) == 3
    assert "use fedskew.deploy.strategy('feddyn'" in said[0]
    caplog.clear()
    with_clients = start(stock(federation), strategy("feddyn", model=network()), rounds=1)
    assert with_clients.train_metrics_clientapp[1]["counted"] == 0
    assert "needs fedskew.deploy.client_app" in caplog.text
    both = start(ours(federation, "feddyn"), strategy("feddyn", model=network()), rounds=1)
    assert both.train_metrics_clientapp[1]["counted"] == 3


def lying(federation: Federated, kind: str, **figures: Any) -> LocalGrid:
    """A stock project of three clients, whose first in the order of the names lies in its metrics."""
    return stock(federation, {"ash": on(kind, lambda _, answer: answer.content["metrics"].update(figures))})


@pytest.mark.parametrize("agreed", [{}, {"classes": 10}, {"target": np.ones(10)}], ids=["majority", "agreed", "target"])
def test_one_client_does_not_choose_the_classes(federation: Federated, caplog: Any, agreed: dict[str, Any]) -> None:
    chosen = strategy("fedpals" if "target" in agreed else "fedla", **agreed)
    start(lying(federation, "query", **{"label-counts": [5, 5, 5]}), chosen, rounds=1)
    assert sorted(chosen.record["answered"]) == [0, 1, 2]
    weights = dict(zip(chosen.record["answered"], chosen.record["weights"], strict=True))
    assert weights[0] == 0
    assert weights[1] + weights[2] == pytest.approx(1)
    assert "label counts: no answer of ash: refused: its label counts are [5, 5, 5]; expected 10 numbers" in caplog.text


def test_clients_that_differ_evenly_are_named(federation: Federated) -> None:
    grid = lying(federation, "query", **{"label-counts": [5, 5, 5]})
    grid.offline.add(federation.node("cedar"))
    with pytest.raises(ConfigError, match=r"differ in their number of classes \(ash 3, birch 10\); pass classes="):
        start(grid, strategy("fedla"), rounds=1)


@pytest.mark.parametrize(
    "figures", [{"num-examples": 10**12}, {"train_loss": float("inf")}, {"train_loss": float("nan")}], ids=str
)
def test_numbers_that_cant_be_are_refused(federation: Federated, figures: dict[str, Any]) -> None:
    chosen = strategy("fedavg")
    start(lying(federation, "train", **figures), chosen, rounds=1)
    assert sorted(chosen.record["answered"]) == [1, 2]


@pytest.mark.parametrize("figures", [{"num-examples": 10**12}, {"accuracy": float("inf")}], ids=str)
def test_an_evaluation_that_cant_be_is_refused(federation: Federated, figures: dict[str, Any]) -> None:
    result = start(lying(federation, "evaluate", **figures), strategy("fedavg"), rounds=1)
    without = start(stock(federation, {"ash": silent_on("evaluate")}), strategy("fedavg"), rounds=1)
    assert result.evaluate_metrics_clientapp[1] == without.evaluate_metrics_clientapp[1]


def test_a_large_metric_of_many_samples_does_not_become_infinite(federation: Federated) -> None:
    grid = lying(federation, "evaluate", **{"num-examples": 10**9, "accuracy": 9e299})
    average = start(grid, strategy("fedavg"), rounds=1).evaluate_metrics_clientapp[1]["accuracy"]
    assert average == pytest.approx(9e299, rel=1e-3)


def test_a_client_that_leaves_a_metric_out_does_not_take_it_from_all(federation: Federated) -> None:
    def without(question: Message, answer: Message) -> None:
        del answer.content["metrics"]["accuracy"]

    grid = stock(federation, {"ash": on("evaluate", without)})
    assert start(grid, strategy("fedavg"), rounds=1).evaluate_metrics_clientapp[1]["accuracy"] > 0


def test_what_a_strategy_cant_do_is_said_before_training() -> None:
    for method, why in (
        ("fedavgg", "unknown name"),
        ("fedconcat", "FedConcat"),
        ("fpl", "method: FPL returns arrays gathered from batches"),
        ("moon", "MOON changes the network"),
    ):
        with pytest.raises(ConfigError, match=why):
            strategy(method, model=network())
    assert set(deploy.__all__) == {name for name in deploy.__all__ if getattr(deploy, name)}


def test_robust_aggregation_and_the_weight_limit_come_with_the_strategy(federation: Federated, caplog: Any) -> None:
    def lie(question: Message, answer: Message) -> None:
        answer.content["metrics"]["num-examples"] = 10**9
        arrays = answer.content["arrays"]
        answer.content["arrays"] = ArrayRecord({name: Array(-1000 * arrays[name].numpy()) for name in arrays})

    chosen = strategy({"aggregation": "median"}, weight_limit=0.4)
    bounded = start(stock(federation, {"ash": on("train", lie)}), chosen)
    assert max(chosen.record["weights"]) == pytest.approx(0.4)
    assert 0 in chosen.record["limited"]
    assert any("the weight limit (0.4) binds: " in entry.message for entry in caplog.records)
    honest = start(stock(federation), strategy("fedavg"))
    for name, array in honest.arrays.items():
        assert np.abs(bounded.arrays[name].numpy() - array.numpy()).max() < 1  # whoever is bad moved it by hundreds
    with pytest.raises(ConfigError, match="weight_limit: expected a share"):
        strategy("fedavg", weight_limit=50)


# The examples for Flower's users: complete app folders, which train.


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODES = 4


def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LocalGrid:
    """Run an app folder's own server on nodes with its own client; return these."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    monkeypatch.syspath_prepend(str(folder))
    apps = {}
    for name in ("serverapp", "clientapp"):
        module, _, attribute = project["components"][name].partition(":")
        apps[name] = getattr(importlib.import_module(module), attribute)
    settings = [{"partition-id": node, "num-partitions": NODES} for node in range(NODES)]
    grid = LocalGrid({100 + node: (f"node-{node}", apps["clientapp"], settings[node]) for node in range(NODES)})
    assert project["config"] == {"rounds": 5}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={"rounds": 3})
    apps["serverapp"](grid, context)
    return grid


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flower-selection", "flower-objective"])
def test_an_example_trains(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    np.random.seed(0)  # Flower's FedAvg samples by global generators  # noqa: NPY002
    grid = train(EXAMPLES / name, monkeypatch)
    accuracies = [float(found) for found in re.findall(r"round \d+: accuracy ([\d.]+)", capsys.readouterr().out)]
    assert len(accuracies) == 3
    # Each node has two or three of ten digits: one that had learned its own alone would be right on 30 % at the most.
    assert accuracies[-1] > 0.4
    kinds = {message.metadata.message_type for message in grid.asked}
    assert ("query" in kinds) is (name == "flower-selection")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flower-selection", "flower-objective"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own
def test_flower_builds_an_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.cli.app import app

    monkeypatch.chdir(tmp_path)
    home = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = CliRunner().invoke(app, ["build", "--app", str(EXAMPLES / name)], env=home)
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("*.fab"))) == 1
    assert "warning" not in done.output.lower()
