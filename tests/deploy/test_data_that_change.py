"""A site whose data change: its label counts are asked for again, and it reads in its own log why it is refused."""

import dataclasses
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated import NAMES, Federated, LocalGrid, federate, fedskew, figures, on, tree
from flwr.app import Error, Message

from fedskew.deploy import Book, SiteData, agree
from fedskew.deploy.terms import CountsRequest


def grow(federation: Federated, name: str) -> None:
    """Triple a site's samples."""
    federation.change_samples(name, lambda own: {key: np.concatenate([own[key]] * 3) for key in "xy"})


@pytest.mark.slow
@pytest.mark.parametrize("label_counts", ["exact", "withheld"])
def test_counts_are_asked_for_again_and_the_site_goes_on(tmp_path: Path, label_counts: str, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3), label_counts=label_counts, evaluation="none")
    _, one, two, three = federation.play(after={1: lambda grid: grow(federation, "ash")})
    assert sorted(one["answered"]) == [0, 1, 2]
    assert two["deployment"]["failed"] == {"ash": "its label counts have changed"}
    assert three["deployment"]["failed"] == three["deployment"]["refused"] == {}
    weight = dict(zip(three["answered"], three["weights"], strict=True))
    assert weight[0] == pytest.approx(450 / 750)
    kept = json.loads((federation.run_folder / "deployment.json").read_text())["sites"]["ash"]
    assert (kept["samples"] if label_counts == "withheld" else sum(kept["counts"])) == 450
    assert "the data have changed since the label counts that the server has" in caplog.text
    assert [sum(entry.released) for entry in Book(tmp_path / "ash" / "state").releases] == [150, 450]


@pytest.mark.slow
def test_noisy_counts_are_released_again_only_if_the_site_says_so(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    federation = federate(tmp_path, tree("fedavg", rounds=3), label_counts="noisy", epsilon=1.0)
    book, data = Book(tmp_path / "ash" / "state"), federation.data_of("ash")
    records = federation.play(after={1: lambda grid: grow(federation, "ash")})
    assert [record["deployment"]["failed"] for record in records[1:]] == [{}, {}, {}]
    assert len(book.releases) == 1

    federation.run_folder.rename(tmp_path / "first")
    agreed = agree(data, federation.app)  # what `deploy site --check` does after it has shown it
    assert agreed.epsilon_total == 2.0
    federation.play()
    assert book.releases.spent("add-remove") == 2.0
    assert sum(book.releases[1].exact) == 450


def test_the_epsilon_of_an_earlier_release_is_what_the_server_records(tmp_path: Path) -> None:
    pytest.importorskip("opendp")
    federation = federate(tmp_path, tree("fedavg", rounds=1), label_counts="noisy", epsilon=2.0)
    asked = CountsRequest("noisy", tuple(federation.agreement.classes), 0.5, "replace")
    site = SiteData.load(federation.data_of("ash"), federation.agreement)
    earlier = Book(tmp_path / "ash" / "state").release(asked, site.counts, asked.once).released
    federation.run(federation.grid())
    sites = json.loads((federation.run_folder / "deployment.json").read_text())["sites"]
    assert sites["ash"]["counts"] == earlier
    assert sites["ash"]["epsilon"] == 0.25  # 0.5 for replaced samples
    assert sites["birch"]["epsilon"] == 2.0


def second(federation: Federated, epsilon: float) -> Federated:
    """Another federation of the same sites, whose books have what they released to the first."""
    federation.run_folder.rename(federation.folder / "first")
    agreement = federation.agreement.model_copy(update={"epsilon": epsilon})
    agreement.write(federation.app / "deploy.toml")
    for name in NAMES:
        agree(federation.data_of(name), federation.app)
    return dataclasses.replace(federation, agreement=agreement)


@pytest.mark.slow
def test_replies_are_held_against_the_noise_of_the_release_that_a_site_answers_with(tmp_path: Path) -> None:
    """1,600 samples are likely noise with epsilon 0.25, and with the agreed 2 only 200."""
    pytest.importorskip("opendp")
    config = tree("fedavg", rounds=1)
    first = federate(tmp_path, config, label_counts="noisy", epsilon=0.25)
    first.run(first.grid())
    later = second(first, epsilon=2.0)
    for name in NAMES:
        with closing(sqlite3.connect(tmp_path / name / "state" / "book.db")) as db, db:
            more = "json_set(value, '$.released[0]', json_extract(value, '$.released[0]') + 500.0)"
            db.execute(f"UPDATE entry SET value = {more} WHERE kind = 'release'")
    (_, record) = later.play()
    assert record["deployment"]["refused"] == {}
    assert sorted(record["answered"]) == [0, 1, 2]


@pytest.mark.slow
def test_a_release_that_is_too_noisy_is_refused_and_agreeing_makes_another(tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("opendp")
    federation = federate(tmp_path, tree("fedavg", rounds=1, steps=1), label_counts="noisy", epsilon=2.0)
    asked = CountsRequest("noisy", tuple(federation.agreement.classes), 0.19)
    book = Book(tmp_path / "ash" / "state")
    book.release(asked, SiteData.load(federation.data_of("ash"), federation.agreement).counts, asked.once)
    federation = dataclasses.replace(
        federation, agreement=federation.agreement.model_copy(update={"start_timeout": 0.1})
    )
    assert sorted(federation.play()[1]["answered"]) == [1, 2]
    assert (
        "no answer of ash: refused: its release has epsilon 0.19, over 10 times noisier than the agreed 2; the "
        "site can make a new one: fedskew deploy site --check data.toml"
    ) in caplog.text
    assert (
        "no label counts: refused: its release has epsilon 0.19"
        in fedskew("deploy", "status", federation.run_folder)[1]
    )

    agreed = {name: agree(federation.data_of(name), federation.app) for name in NAMES}
    assert agreed["ash"].epsilon_total == pytest.approx(2.19)
    federation.run_folder.rename(tmp_path / "first")
    assert sorted(federation.play()[1]["answered"]) == [0, 1, 2]
    assert book.releases.spent("add-remove") == pytest.approx(2.19)


def test_a_site_cant_claim_so_much_noise_that_any_reply_is_plausible(tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("opendp")
    noisy = {"label_counts": "noisy", "epsilon": 2.0, "start_timeout": 0.1}
    federation = federate(tmp_path, tree("fedavg", rounds=1, steps=1), **noisy)
    records = federation.play({"birch": on("query", figures(epsilon=1e-9))})
    assert sorted(records[1]["answered"]) == [0, 2]
    assert "label counts: no answer of birch: refused: its release has epsilon 1e-09" in caplog.text


def test_a_site_reads_in_its_own_log_why_it_is_refused(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2), evaluation="none")
    federation.play({"birch": on("train", figures(fedskew_steps=600), last=1)})
    said = [entry.message for entry in caplog.records if "the server refused what this site sent" in entry.message]
    assert len(said) == 1
    assert "round 1: its steps are 600" in said[0]


def test_a_site_reads_why_its_label_counts_are_refused(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1), start_timeout=0.1, evaluation="none")
    now, ahead = time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now() + ahead[0])

    def wait_a_minute(grid: LocalGrid) -> None:
        ahead[0] += 60.0

    federation.play({"birch": on("query", figures(label_counts=[-1] * 10))}, after={0: wait_a_minute})
    assert "the server refused what this site sent: label counts: one of its label counts is -1" in caplog.text


@pytest.mark.slow
def test_a_site_that_says_so_every_round_is_asked_once_in_a_while(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2), evaluation="none")

    def tamper(question: Message, answer: Message) -> Message:
        changed = Error(2, "its label counts have changed")
        return Message(changed, reply_to=question) if question.metadata.message_type == "train" else answer

    _, grid = federation.played({"ash": tamper})
    assert grid.kinds("ash").count("query") == 2
