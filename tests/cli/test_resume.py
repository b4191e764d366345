"""`--resume` goes on with a run, and starts none where there is none to go on with."""

from __future__ import annotations

import sys

import pytest

CONFIG = """
name = "task"
data = {name = "digits", rows = 200}
partition = {rule = "iid", clients = 3}
model = {name = "logistic"}
method = {weighting = {name = "powers:Power"}}
training = {rounds = 1}
"""
POWER = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Power:
    power: float = DEFAULT

    def weigh(self, answered):
        raw = answered.sizes**self.power
        return raw / raw.sum()
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "task.toml").write_text(CONFIG)
    (tmp_path / "powers.py").write_text(POWER.replace("DEFAULT", "0.5"))
    yield tmp_path
    sys.modules.pop("powers", None)


def test_with_no_run_it_is_refused_in_one_line_that_says_what_would_start_one(home, command):
    done = command("run", "task.toml", "--resume", cwd=home, status=2)
    assert done.stderr == (
        "fedskew: --resume: runs has no run of this config to go on with; leave out --resume to start a new run\n"
    )
    assert not (home / "runs").exists()


@pytest.mark.slow
def test_after_a_changed_default_the_nearest_run_and_the_difference_are_named(home, command):
    command("run", "task.toml", cwd=home)
    (folder,) = (home / "runs").iterdir()
    command("run", "task.toml", "--resume", cwd=home)
    sys.modules.pop("powers")
    (home / "powers.py").write_text(POWER.replace("DEFAULT", "0.75"))
    done = command("run", "task.toml", "--resume", cwd=home, status=2)
    assert f"runs/{folder.name} differs in method.weighting.power (0.5 there, 0.75 here)" in done.stderr
    assert [path.name for path in (home / "runs").iterdir()] == [folder.name]


@pytest.mark.slow
def test_of_several_runs_those_that_are_there_go_on_and_the_others_begin(home, command):
    command("run", "task.toml", "--method", "fedavg", cwd=home)
    command("run", "task.toml", "--method", "fedavg", "--method", "fedla", "--resume", cwd=home)
    assert len(list((home / "runs").glob("*/model.safetensors"))) == 2
