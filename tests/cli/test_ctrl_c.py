"""Ctrl-C in the middle of a run and of a sweep: what is said, what is left, and that the same command goes on.

The signal is sent from inside a network that trains in a process of its own, to itself and to the command, as a
terminal sends it to all. With the command in a process of its own: `make test-faults`.
"""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedskew
from fedskew.experiment import Sweep, run_sweep

CONFIG = """
schema = 1
name = "task"
data = {name = "digits", rows = 300}
partition = {rule = "quantity", clients = 10, labels_per_client = 2}
model = {name = "pressing:Pressing"}
training = {rounds = 8, participation = 0.3, momentum = 0.9}
"""
PRESSING = """
import multiprocessing, os, pathlib, signal
from torch import nn


class Pressing(nn.Module):
    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        flag = pathlib.Path("flag")
        if multiprocessing.parent_process() is not None and flag.exists():
            command, lines = map(int, flag.read_text().split())
            if sum(len(path.read_text().splitlines()) for path in pathlib.Path("runs").glob("*/rounds.jsonl")) >= lines:
                flag.unlink(missing_ok=True)
                os.kill(command, signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
        return self.layer(x.flatten(1)).tanh()  # a linear network alone is trained without its forward
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder, where Ctrl-C is ignored, as in a job that a shell has put into the background: the command hears it."""
    (tmp_path / "pressing.py").write_text(PRESSING)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield tmp_path
    signal.signal(signal.SIGINT, before)


def press_after(lines: int, home: Path) -> None:
    """Let Ctrl-C be pressed once that many rounds are written."""
    (home / "flag").write_text(f"{os.getpid()} {lines}")


def test_a_run_in_processes_leaves_none_and_goes_on_to_the_same_bytes(home, command, monkeypatch):
    (home / "task.toml").write_text(CONFIG)
    words = ("run", "task.toml", "--set", "engine={backend='processes', processes=1}")
    press_after(4, home)
    stopped = command(*words, status=130)
    assert "stopped; continue with --resume" in stopped.stdout
    assert "Traceback" not in stopped.stdout + stopped.stderr
    assert not multiprocessing.active_children()
    (folder,) = (home / "runs").iterdir()
    assert len((folder / "rounds.jsonl").read_text().splitlines()) in (4, 5)

    command(*words, "--resume")
    rounds = [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(9))
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    fedskew.simulate("task.toml", out="whole", engine={"backend": "sequential"})
    (whole,) = home.glob("whole/*/model.safetensors")
    assert (folder / "model.safetensors").read_bytes() == whole.read_bytes()


def test_a_sweep_does_only_what_is_missing_and_ends_with_the_same_tables(home, command, monkeypatch):
    sweep = '[sweep]\nmethods = [{label = "short", preset = "fedla", set = {training.rounds = 2}}, "fedprox"]\n'
    (home / "task.toml").write_text(CONFIG + sweep)
    press_after(3 + 4, home)
    stopped = command("sweep", "task.toml", "--processes", "1", status=130)
    first, *_, last = stopped.stdout.splitlines()
    assert first.startswith("1 of 2 runs  short, seed 0: accuracy ")
    assert (last, stopped.stderr) == ("stopped; run the same command again to continue", "")
    assert not multiprocessing.active_children()
    (short,) = (home / "runs").glob("task-short-*")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in short.rglob("*") if path.is_file()}

    done = command("sweep", "task.toml", "--processes", "1")
    first, second, *_ = done.stdout.splitlines()
    assert first == "1 of 2 runs are finished already"
    assert second.startswith("2 of 2 runs  fedprox, seed 0: accuracy ")
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before}

    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    whole = run_sweep(Sweep.read(Path("task.toml")), Path("whole"), processes=1)
    assert f"runs/{whole.folder.name}/report.html" in done.stdout
    for model in home.glob("runs/task-*/model.safetensors"):
        assert model.read_bytes() == (home / "whole" / model.relative_to(home / "runs")).read_bytes()
    ours, theirs = (
        [
            re.sub("[0-9]+ s of training", "", line.rsplit("|", 2)[0])
            for line in (home / out / whole.folder.name / "table.md").read_text().splitlines()
        ]
        for out in ("runs", "whole")
    )
    assert ours == theirs
