"""The server's run, with what goes wrong at its sites."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated import NAMES, KilledError, LocalGrid, check_models, federate, figures, on, silent_on, tree
from flwr.app import Array, Message

import fedskew
from fedskew.deploy import Agreement
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import RunFolder, resolve
from fedskew.files import locked


def spoil(value: float) -> Callable[[Message, Message], None]:
    def change(question: Message, answer: Message) -> None:
        for name, array in list(answer.content["arrays"].items()):
            answer.content["arrays"][name] = Array(np.full(array.shape, value, np.float32))

    return change


@pytest.mark.slow
def test_a_reply_of_nan_is_refused_and_counted_and_touches_nothing(tmp_path: Path, caplog: Any) -> None:
    federation, without = (federate(tmp_path / name, tree("fedavg", rounds=1)) for name in "ab")
    record = federation.play({"birch": on("train", spoil(float("nan")))})[1]
    silent = without.play({"birch": silent_on("train")})[1]
    assert list(record["deployment"]["refused"]) == ["birch"]
    assert "NaN" in record["deployment"]["refused"]["birch"]
    assert record["answered"] == [client for client in record["cohort"] if client != 1]
    assert [entry.message for entry in caplog.records if "no answer of birch: refused" in entry.message]
    check_models(federation.run_folder, without.run_folder, rtol=0, atol=0)
    assert silent["deployment"]["silent"] == ["birch"]

    deployed = fedskew.load(federation.run_folder)
    assert deployed.classes == tuple(federation.agreement.classes)
    assert deployed.info.mean == tuple(federation.agreement.mean)
    assert deployed.predict(np.zeros((2, *federation.agreement.shape))).shape == (2, len(deployed.classes))


@pytest.mark.slow
def test_an_update_out_of_line_is_reported_and_left_out_if_so_agreed(tmp_path: Path) -> None:
    for action, answered in (("report", 3), ("leave_out", 2)):
        federation = federate(
            tmp_path / action, tree("fedavg", rounds=1), norm_action=action, norm_limit=5.0, loss_limit=1e300
        )
        record = federation.play({"cedar": on("train", spoil(50.0))})[1]
        assert len(record["answered"]) == answered
        assert list(record["deployment"]["out_of_line"]) == ["cedar"]
        assert record["deployment"]["out_of_line"]["cedar"] > 5


@pytest.mark.slow
def test_robust_aggregation_at_real_sites_holds_a_site_that_the_checks_let_through(tmp_path: Path, caplog: Any) -> None:
    method = {"preset": "fedavg", "aggregation": {"name": "geometric_median"}}
    federation = federate(tmp_path / "a", tree(method, rounds=2, weight_limit=0.4), norm_limit=1e9)
    records = federation.play({"cedar": on("train", spoil(50.0))})[1:]
    assert [record["weights"][record["answered"].index(2)] < 0.02 for record in records] == [True, True]
    assert all(record["limited"] for record in records)
    assert any("the weight limit (0.4) binds: " in entry.message for entry in caplog.records)


def test_fewer_sites_than_the_aggregation_needs_are_refused_at_the_start(tmp_path: Path) -> None:
    few = federate(tmp_path, tree({"aggregation": "krum"}))
    grid = few.grid()
    with pytest.raises(ConfigError, match="method: aggregation: krum needs 5 clients, and has 3; let more clients"):
        few.run(grid)


@pytest.mark.slow
def test_a_reply_to_an_earlier_round_or_of_another_client_is_refused(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2))
    first: list[Message] = []

    def replay(question: Message, answer: Message) -> Message:
        if question.metadata.message_type != "train":
            return answer
        first.append(answer)
        return Message(first[0].content, reply_to=question)

    _, one, two = federation.play({"birch": replay, "cedar": on("train", figures(fedskew_client=0))})
    assert one["deployment"]["refused"] == {"cedar": "the reply is of fedskew-client 0, not 2"}
    assert two["deployment"]["refused"]["birch"] == "the reply is of server-round 1, not 2"
    assert two["answered"] == [0]


@pytest.mark.slow
def test_a_site_that_is_gone_costs_its_update_only_and_may_come_back(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("scaffold", rounds=3), start_timeout=0.1)
    records = federation.play(away=("ash",), after={2: lambda grid: grid.offline.clear()})
    assert [record["deployment"]["offline"] for record in records[1:]] == [["ash"], ["ash"], []]
    assert sorted(records[3]["answered"]) == [0, 1, 2]


@pytest.mark.slow
def test_no_connected_site_leaves_the_model_and_plays_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2))
    grid = federation.grid()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            grid.offline.clear()

    monkeypatch.setattr("time.sleep", nap)
    records = federation.play(grid=grid, after={1: LocalGrid.leave})
    assert len(naps) == 3
    assert [record["round"] for record in records] == [0, 1, 2]
    assert [entry.message for entry in caplog.records if "waiting after round 1" in entry.message]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", pytest.param("moon", marks=pytest.mark.whole_product)])
def test_a_server_killed_in_a_round_goes_on_at_it_and_no_round_counts_twice(tmp_path: Path, method: str) -> None:
    whole, cut = (federate(tmp_path / name, tree(method, steps=2)) for name in ("whole", "cut"))
    whole.play()

    def die(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train" and question.content["config"]["server-round"] == 2:
            raise KilledError  # after the sites have trained this round, and written what they keep of it
        return answer

    grid = cut.grid({"cedar": die})
    with pytest.raises(KilledError):
        cut.run(grid).run(resume=True)
    assert [record["round"] for record in cut.play()] == [0, 1, 2, 3]
    check_models(cut.run_folder, whole.run_folder, rtol=0, atol=0)
    assert len(grid.questions("query")) == len(NAMES)


@pytest.mark.slow
def test_a_sites_state_of_an_uncounted_round_is_discarded(tmp_path: Path) -> None:
    """SCAFFOLD's control variate of a refused round must not outlive it: as if the site had been away."""
    config = tree("scaffold", steps=2)
    refused, away = (federate(tmp_path / name, config, evaluation="none") for name in ("refused", "away"))
    refused.play({"ash": on("train", spoil(float("inf")), first=2, last=2)})

    absent = away.node("ash")
    away.play(after={1: lambda grid: grid.offline.add(absent), 2: lambda grid: grid.offline.clear()})
    check_models(refused.run_folder, away.run_folder, rtol=0, atol=0)


@pytest.mark.slow
def test_a_site_that_connects_late_reports_its_counts_then_and_joins(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg"), start_timeout=0.1)
    grid = federation.grid(away=["cedar"])
    run = federation.run(grid)
    assert run.task().counts[2].sum() == 0

    def come(record: Any) -> None:
        if record["round"] == 1:
            grid.offline.clear()

    run.run(resume=True, progress=come)
    records = federation.records()
    assert sorted(records[1]["answered"]) == [0, 1]
    assert sorted(records[3]["answered"]) == [0, 1, 2]
    (written,) = RunFolder.read_runs(federation.run_folder)
    assert written.counts.sum(axis=1).tolist() == [150, 90, 210]


def test_two_nodes_of_one_name_are_not_used(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1), start_timeout=0.1)
    grid = federation.grid()
    grid.apps[5] = grid.apps[federation.node("ash")]
    grid.apps[6] = ("somebody", *grid.apps[5][1:])
    assert sorted(federation.play(grid=grid)[1]["answered"]) == [1, 2]
    assert {grid.name_of(message) for message in grid.asked} == {"birch", "cedar"}


def test_withheld_counts_serve_methods_that_need_none(tmp_path: Path) -> None:
    federation, grid = federate(tmp_path, tree("fedavg", rounds=1), label_counts="withheld").played()
    record = federation.records()[1]
    sizes = {0: 150, 1: 90, 2: 210}
    np.testing.assert_allclose(record["weights"], [sizes[client] / 450 for client in record["answered"]])
    assert record["entropy"] is None
    assert record["evaluation"] is None
    kept = json.loads((federation.run_folder / "deployment.json").read_text())
    assert kept["sites"]["ash"]["counts"] is None
    assert kept["sites"]["ash"]["samples"] == 150
    assert {message.metadata.message_type for message in grid.asked} == {"query", "train", "query.keep"}


@pytest.mark.slow
def test_noisy_counts_are_drawn_once_and_stored_with_their_epsilon(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    agreed = {"label_counts": "noisy", "epsilon": 0.5}
    federation = federate(tmp_path, tree("fedentopt+fedla", rounds=2, participation=0.67), **agreed)
    federation.play()
    kept = json.loads((federation.run_folder / "deployment.json").read_text())
    reported = np.array([kept["sites"][name]["counts"] for name in NAMES])
    assert (reported >= 0).all()
    assert (reported != np.round(reported)).any()
    assert kept["sites"]["ash"]["epsilon"] == 0.5
    again = federation.run_folder.with_name("again")
    (federation.run_folder).rename(again)
    federation.run(federation.grid())
    asked_again = json.loads((federation.run_folder / "deployment.json").read_text())
    assert asked_again["sites"]["ash"]["counts"] == kept["sites"]["ash"]["counts"]


@pytest.mark.slow
def test_a_target_comes_from_a_file(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedpals", rounds=1))
    shares = np.arange(1, 11) / 55
    file = tmp_path / "target.csv"
    file.write_text("class,share\n" + "".join(f"{digit},{share}\n" for digit, share in enumerate(shares)))
    run = federation.run(federation.grid(), file)
    np.testing.assert_allclose(run.task().target, shares)
    run.run(resume=True)
    assert federation.records()[1]["target_distance"] is not None


@pytest.mark.slow
def test_a_run_of_another_agreement_is_not_gone_on_with(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    federation.play()
    other = federation.agreement.model_copy(update={"label_counts": "withheld"})
    object.__setattr__(federation, "agreement", other)
    with pytest.raises(RunError, match="label_counts = exact"):
        federation.run(federation.grid())


def test_a_site_whose_data_does_not_fit_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1), start_timeout=0.1)
    federation.change_samples("cedar", lambda own: {"y": np.where(own["y"] == 9, 42, own["y"])})
    record = federation.play()[1]
    assert sorted(record["answered"]) == [0, 1]
    assert "DataError" in record["deployment"]["failed"]["cedar"]


AGREED: dict[str, Any] = {"sites": ["a", "b"], "classes": [str(c) for c in range(10)], "shape": [64]}


@pytest.mark.parametrize(
    ("config", "agreed", "message"),
    [
        (tree("fedentopt"), {"label_counts": "withheld"}, "selection: fedentopt needs the clients' label counts"),
        (tree("fedla"), {"label_counts": "withheld"}, "weighting: fedla needs the clients' label counts"),
        (tree("fpl"), {"label_counts": "noisy", "epsilon": 1.0}, "returns how many samples of each class"),
        (tree("seol_kim"), {"label_counts": "noisy", "epsilon": 1.0}, "quotas"),
        (tree("fedconcat"), {}, "FedConcat's stages are not deployed"),
        (tree("fedavg") | {"seeds": [0, 1]}, {}, "runs one seed"),
        (tree("fedavg") | {"conditions": {"dropout": 0.5}}, {}, "drop out by themselves"),
        (tree("fedpals") | {"target": {"mix": [0.5, 0.5]}}, {}, "one share for each class"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cant_be_deployed_is_refused_with_the_reason(config: Any, agreed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Agreement(**AGREED, **agreed).check_config(resolve(config))


@pytest.mark.parametrize(
    "method", ["fedavg", "uniform", "fedprox", "fedvls", "fedrs", "scaffold", "moon", "fedexp", "feddyn"]
)
def test_methods_that_need_no_counts_may_withhold_them(method: str) -> None:
    Agreement(**AGREED, label_counts="withheld").check_config(resolve(tree(method)))


# Two runs never write one folder.


HOLD = """
import sys, time
from pathlib import Path
from fedskew.files import locked
with locked(Path(sys.argv[1]), 0.0, lambda: None):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_writes_is_left_alone_until_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(RunError, match="another run is writing here"), locked(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with locked(tmp_path):
            pass


def test_a_folder_may_be_written_again_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "run"):
            (tmp_path / "run" / "rounds.jsonl").write_text("")
