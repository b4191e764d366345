"""A round lasts as long as agreed, whatever a site announces and withholds."""

import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federated import NAMES, LocalGrid, federate, fedskew, silent_on, tree
from flwr.app import Message, RecordDict

from common import stop_at
from fedskew.deploy import _ask
from fedskew.errors import EndedEarlyError


@dataclass
class WithholdingGrid(LocalGrid):
    """Flower waits for a reply that a node announced and does not send: here for as long as the test lasts."""

    withheld: set[int] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)
    late: bool = False

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        names = list(message_ids)
        questions = {message.metadata.message_id: message.metadata for message in self.asked}
        for name in names:
            if questions[name].dst_node_id in self.withheld and questions[name].message_type == "train":
                self.late |= not self.released.wait(60.0)  # then it comes
        return super().pull_messages(names)


def test_a_reply_that_is_announced_and_withheld_does_not_hold_up_the_round(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1), round_timeout=0.5, evaluation="none")
    grid = WithholdingGrid(federation.grid().apps, withheld={federation.node("birch")})
    record = federation.play(grid=grid)[1]
    assert not grid.late
    grid.released.set()
    assert sorted(record["answered"]) == [0, 2]
    assert record["deployment"]["silent"] == ["birch"]


def test_an_interrupt_that_a_thread_of_flowers_raises_ends_a_round_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ask, "LONGEST_PAUSE", 0.05)
    grid: Any = SimpleNamespace(push_messages=lambda _: ["0"], pull_messages=lambda _: [])
    began = time.monotonic()
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()  # as where its SuperLink has ended
    with pytest.raises(KeyboardInterrupt):
        _ask.exchange(grid, {0: 1}, {0: RecordDict()}, "train", 30.0)
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_site_that_never_answers_is_skipped_for_longer_and_longer(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=7, steps=1), round_timeout=0.3, evaluation="none")
    grid = federation.grid({"ash": silent_on("train")})

    with pytest.raises(KeyboardInterrupt):
        federation.run(grid).run(resume=True, progress=stop_at(3))
    records = federation.play(grid=grid)  # how long it is skipped is part of the server's state
    assert [record["round"] for record in records if record["deployment"]["silent"]] == [1, 3, 6]
    assert [record["round"] for record in records if record["deployment"]["skipped"]] == [2, 4, 5, 7]
    assert grid.kinds("ash") == ["query", "train", "train", "train"]
    assert all(sorted(record["answered"]) == [1, 2] for record in records[1:])

    status, said = fedskew("deploy", "status", federation.run_folder)
    assert status == 0
    assert "trained to its end; round 7 of 7" in said
    row = next(line.split() for line in said.splitlines() if line.split()[:1] == ["ash"])
    assert row[1:8] == ["0", "of", "3", "3", "silent,", "4", "skipped"]
    assert f"ash: round 6, {records[6]['deployment']['ended']}: no reply in time" in said


def test_sites_that_did_not_answer_are_asked_where_the_others_are_gone(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3, steps=1), round_timeout=0.3, evaluation="none")

    def turn(grid: LocalGrid) -> None:  # these two have time again, and the third goes away
        grid.tamper.clear()
        grid.offline.add(federation.node("cedar"))

    records = federation.play({"ash": silent_on("train"), "birch": silent_on("train")}, after={1: turn})
    assert sorted(records[1]["deployment"]["silent"]) == ["ash", "birch"]
    assert [sorted(record["answered"]) for record in records[2:]] == [[0, 1], [0, 1]]
    assert all(record["deployment"]["skipped"] == [] for record in records[2:])


@pytest.mark.slow
def test_a_site_that_trains_and_withholds_its_evaluation_is_skipped_too(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=3, steps=1), round_timeout=0.5)
    records = federation.play({"ash": silent_on("evaluate")})
    assert [list(record["deployment"]["unevaluated"]) for record in records] == [["ash"], [], ["ash"], []]
    assert [record["deployment"]["skipped"] for record in records] == [[], ["ash"], [], ["ash"]]


@pytest.mark.slow
def test_when_no_site_comes_back_the_run_ends_and_can_be_gone_on_with(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=2, steps=1), idle_timeout=0.1, start_timeout=0.1)
    grid = federation.grid()

    with pytest.raises(EndedEarlyError, match="no site was connected for 0 s; the run ends after round 1"):
        federation.play(grid=grid, after={1: LocalGrid.leave})
    other = federate(tmp_path / "other", tree("fedavg"), idle_timeout=0.1, start_timeout=0.1, min_sites=2)
    with pytest.raises(EndedEarlyError, match="0 of 3 sites have reported"):
        other.run(other.grid(away=NAMES))
    grid.offline.clear()
    assert len(federation.play(grid=grid)) == 3
