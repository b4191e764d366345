"""How a deployed run ended is told by the exit status of the command that waits for it."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from federated import NAMES, LocalGrid, federate, fedskew, on, served, times, tree
from flwr.app import Message
from safetensors.numpy import load_file

from common import largest_file


@pytest.mark.slow
def test_a_run_that_is_trained_to_its_end(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1, steps=1))
    assert served(federation, federation.grid()) == (0, "")
    assert next(tmp_path.glob("server/runs/*/report.html")).exists()
    assert served(federation, federation.grid()) == (0, "")  # a finished run is only read
    assert "it was trained to its end before" in caplog.text


def test_a_run_that_stopped_as_its_model_was_ruined(tmp_path: Path, caplog: Any) -> None:
    agreed = {"undone_limit": 1, "norm_limit": 1e300, "norm_action": "report"}
    federation = federate(tmp_path, tree("fedavg", rounds=3, steps=1), **agreed)
    grid = federation.grid({"ash": on("train", lambda _, answer: times(1e30, answer))})
    code, message = served(federation, grid)
    assert code == 1
    assert message.startswith("the model was ruined in rounds 1, and is again that of round 0; left out: ash.")
    assert not [record for record in caplog.records if record.exc_info]  # one line, no traceback
    folder = next(tmp_path.glob("server/runs/*/rounds.jsonl")).parent
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "was undone: the model&#39;s loss is " in page
    assert "Median over sites of the accuracy on their own test samples: " in page
    assert '<th scope="row">ash</th><td>0 of 1</td>' in page
    assert load_file(folder / "model.safetensors")  # the last good one
    assert not (folder / "summary.json").exists()


@pytest.mark.slow
def test_a_run_in_which_every_reply_is_refused(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1, steps=1))
    ruin = dict.fromkeys(federation.names, on("train", lambda _, answer: times(float("nan"), answer)))
    code, message = served(federation, federation.grid(ruin))
    assert (code, "no update of any site has moved the model up to round 1" in message) == (4, True)


def test_a_config_that_is_refused(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    toml = federation.app / "deploy.toml"
    toml.write_text(toml.read_text() + "round_timeoutt = 3\n")
    code, message = served(federation, federation.grid())
    assert (code, "round_timeoutt: no such key (did you mean 'round_timeout'?)" in message) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 2])
def test_a_full_disk_is_one_line_and_nothing_is_lost(tmp_path: Path, caplog: Any, first: int) -> None:
    config = tree("fedavg", rounds=2, steps=1) | {"model": {"name": "mlp3", "width": 200}}  # larger than a site's book
    cut, whole = (federate(tmp_path / name, config) for name in ("cut", "whole"))
    with ExitStack() as limit:

        def fill(question: Message, answer: Message) -> Message:
            if question.metadata.message_type == "train" and question.content["config"]["server-round"] == first:
                limit.enter_context(largest_file(100_000))
            return answer

        grid = cut.grid({"ash": fill})
        if first == 0:
            limit.enter_context(largest_file(100_000))
        code, message = served(cut, grid)
    assert (code, "can't be written: " in message, "File too large" in message) == (2, True, True)
    assert not [record for record in caplog.records if record.exc_info]
    assert served(cut, cut.grid())[0] == served(whole, whole.grid())[0] == 0
    one, other = (next(place.folder.glob("server/runs/*/model.safetensors")) for place in (cut, whole))
    assert one.read_bytes() == other.read_bytes()
    assert len(grid.questions("query")) == 3


@pytest.mark.slow
def test_a_round_is_called_done_once_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = federate(tmp_path, tree("scaffold", rounds=2, steps=1))
    fsync, on_disk, done = os.fsync, {}, []

    def written(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def check(record: Any) -> None:
        files = [path for path in federation.run_folder.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {"rounds.jsonl", "deployment.json", "state.safetensors"}
        assert [path.name for path in files if on_disk.get(path.stat().st_ino) != path.stat().st_size] == []
        done.append(record["round"])

    monkeypatch.setattr("os.fsync", written)
    federation.run(federation.grid()).run(resume=True, progress=check)
    assert done == [0, 1, 2]
    assert (federation.run_folder / "deployment.json").stat().st_mode & 0o777 == 0o600


def test_no_site_for_too_long(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1), idle_timeout=0.1, start_timeout=0.1)
    code, message = served(federation, federation.grid(away=NAMES))
    assert (code, "0 of 3 sites have reported" in message) == (3, True)


class DeadGrid(LocalGrid):
    """A SuperLink that ended."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise httpx.ConnectError("All connection attempts failed")


def test_a_superlink_that_ended(tmp_path: Path) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    code, message = served(federation, DeadGrid(federation.grid().apps))
    assert (code, "the SuperLink has ended" in message) == (3, True)


class FaultyGrid(LocalGrid):
    def get_nodes(self) -> Iterable[Any]:
        raise ZeroDivisionError("two\nlines")


def test_a_fault_that_nobody_foresaw(tmp_path: Path, caplog: Any) -> None:
    federation = federate(tmp_path, tree("fedavg", rounds=1))
    code, message = served(federation, FaultyGrid(federation.grid().apps))
    assert (code, "unexpected: ZeroDivisionError: two lines" in message) == (70, True)
    assert [record for record in caplog.records if record.exc_info]  # here the traceback is wanted


FLOWER = """#!/bin/sh
for word in "$@"; do case $word in ended=*) eval "$word" ;; esac; done
{act}
"""


@pytest.mark.parametrize(
    ("act", "code", "says"),
    [
        ("printf '[0, \"\"]' > $ended", 0, ""),
        ("printf '[1, \"the model was ruined\"]' > $ended", 1, "the model was ruined"),
        ("printf '[2, \"a disk is full\"]' > $ended", 2, "a disk is full"),
        ("exit 0", 3, "its process ended without a word, as when it is killed; start it again"),
        ("exit 1", 3, "flwr run ended with status 1, as when superlink.sh does not run; start that, then run.sh again"),
    ],
)
def test_the_command_ends_with_the_status_that_the_run_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, code: int, says: str
) -> None:
    """Flower's command itself ends with 0 in the first four cases; it is played by a script."""
    (tmp_path / "flwr").write_text(FLOWER.format(act=act))
    (tmp_path / "flwr").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    status, said = fedskew("deploy", "run", "../app", "fedskew", "--run-config", 'out="runs"')
    assert status == code
    assert says in said
    assert [path.name for path in tmp_path.iterdir()] == ["flwr"]


def test_a_disk_that_is_full_before_the_run_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with largest_file(100):
        status, said = fedskew("deploy", "run", "../app", "fedskew")
    assert (status, "can't be written" in said) == (2, True)
