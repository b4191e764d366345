"""A site whose data change: its label counts are asked for again, and it reads in its own log why it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated import Federated, federate, tree
from flwr.app import Error, Message

from fedskew.deploy import CountsAsked, Ledger, agree, load_site


def lines(federation: Federated) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (federation.run_folder / "rounds.jsonl").read_text().splitlines()]


def grow(federation: Federated, name: str) -> None:
    """Triple a site's samples."""
    path = federation.folder / name / "own.npz"
    own = dict(np.load(path))
    np.savez(path, **own | {key: np.concatenate([own[key]] * 3) for key in ("x", "y")})


def trained(federation: Federated, after_round_one: Any) -> Any:
    grid = federation.grid()

    def change(record: Any) -> None:
        if record["round"] == 1:
            after_round_one(grid)

    federation.run(grid).run(resume=True, progress=change)
    return grid


@pytest.mark.parametrize("label_counts", ["exact", "withheld"])
def test_counts_are_asked_for_again_and_the_site_goes_on(tmp_path: Path, label_counts: str, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3), label_counts=label_counts, evaluation="none")
    trained(federation, lambda grid: grow(federation, "ash"))
    _, one, two, three = lines(federation)
    assert sorted(one["answered"]) == [0, 1, 2]
    assert two["deployment"]["failed"] == {"ash": "its label counts have changed"}
    assert three["deployment"]["failed"] == three["deployment"]["refused"] == {}
    weight = dict(zip(three["answered"], three["weights"], strict=True))
    assert weight[0] == pytest.approx(450 / 750)
    kept = json.loads((federation.run_folder / "deployment.json").read_text())["sites"]["ash"]
    assert (kept["samples"] if label_counts == "withheld" else sum(kept["counts"])) == 450
    assert "the data have changed since the label counts that the server has" in caplog.text
    assert [sum(entry.released) for entry in Ledger(tmp_path / "ash" / "state").releases] == [150, 450]


def test_noisy_counts_are_released_again_only_if_the_site_says_so(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    federation = federate(tmp_path, tree("fedavg", rounds=3), label_counts="noisy", epsilon=1.0)
    ledger, data = Ledger(tmp_path / "ash" / "state"), federation.data_of("ash")
    trained(federation, lambda grid: grow(federation, "ash"))
    assert [record["deployment"]["failed"] for record in lines(federation)[1:]] == [{}, {}, {}]
    assert len(ledger.releases) == 1

    federation.run_folder.rename(tmp_path / "first")
    agreed = agree(data, federation.app)  # what `deploy site --check` does after it has shown it
    assert agreed.epsilon_total == 2.0
    trained(federation, lambda grid: None)
    assert ledger.spent("add-remove") == 2.0
    assert sum(ledger.releases[1].exact) == 450


def test_the_epsilon_of_an_earlier_release_is_what_the_server_records(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    federation = federate(tmp_path, tree("fedavg", rounds=1), label_counts="noisy", epsilon=2.0)
    asked = CountsAsked("noisy", tuple(federation.agreement.classes), 0.5, "replace")
    site = load_site(federation.data_of("ash"), federation.agreement)
    earlier, _ = Ledger(tmp_path / "ash" / "state").release(asked, site.counts, None)
    federation.run(federation.grid())
    sites = json.loads((federation.run_folder / "deployment.json").read_text())["sites"]
    assert sites["ash"]["counts"] == earlier
    assert sites["ash"]["epsilon"] == 0.25  # 0.5 for replaced samples
    assert sites["birch"]["epsilon"] == 2.0


def test_a_site_reads_in_its_own_log_why_it_is_refused(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2), evaluation="none")
    grid, node = federation.grid(), federation.node("birch")

    def tamper(question: Any, answer: Any) -> Any:
        if question.metadata.message_type == "train" and question.content["config"]["server-round"] == 1:
            answer.content["metrics"]["fedskew-steps"] = 600
        return answer

    grid.tamper[node] = tamper
    federation.run(grid).run(resume=True)
    said = [entry.message for entry in caplog.records if "the server refused what this site sent" in entry.message]
    assert len(said) == 1
    assert "round 1: its steps are 600" in said[0]


def test_a_site_reads_why_its_label_counts_are_refused(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedskew.deploy._roster.RETRY", 0.0)
    federation = federate(tmp_path, tree("fedavg", rounds=1), start_timeout=0.1, evaluation="none")
    grid, node = federation.grid(), federation.node("birch")

    def tamper(question: Any, answer: Any) -> Any:
        if question.metadata.message_type == "query":
            answer.content["metrics"]["label-counts"] = [-1] * 10
        return answer

    grid.tamper[node] = tamper
    federation.run(grid).run(resume=True)
    assert "the server refused what this site sent: label counts: one of its label counts is -1" in caplog.text


def test_a_site_that_says_so_every_round_is_asked_once_in_a_while(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2), evaluation="none")
    grid, node = federation.grid(), federation.node("ash")

    def tamper(question: Message, answer: Message) -> Message:
        changed = Error(2, "its label counts have changed")
        return Message(changed, reply_to=question) if question.metadata.message_type == "train" else answer

    grid.tamper[node] = tamper
    federation.run(grid).run(resume=True)
    queries = [message for message in grid.asked if message.metadata.message_type == "query"]
    assert sum(message.metadata.dst_node_id == node for message in queries) == 2
