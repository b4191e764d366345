"""The commands that train and report, as a person types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = """\
schema = 1
name = "small"
seeds = [0]
[data]
name = "digits"
[partition]
rule = "quantity"
clients = 10
labels_per_client = 3
[model]
name = "logistic"
[training]
rounds = 2
[quick]
"training.rounds" = 1
"""


def fedskew(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedskew", *map(str, words)],
        capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | {"COLUMNS": "200"} | environment,
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_run_trains_and_says_where_the_report_is(config, tmp_path):
    done = fedskew("run", config, "--seeds", "0,1", "--set", "training.lr=0.1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert "±" in done.stdout
    (page,) = (tmp_path / "runs").glob("small-*/report.html")
    assert str(page.relative_to(tmp_path)) in done.stdout


def test_several_methods_give_one_comparison_and_report_compares_folders(config, tmp_path):
    done = fedskew("run", config, "--quick", "--method", "fedavg", "--method", "fedla", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"small-fedavg", "small-fedla"} <= set(done.stdout.split())
    assert (tmp_path / "runs" / "small.html").exists()
    folders = sorted((tmp_path / "runs").glob("small-*-*"))
    done = fedskew("report", *folders, "--out", "both.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "small-fedla" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "none.toml"], "none.toml"),
        (["run", "small.toml", "--set", "training.lr=-1"], "training.lr"),
        (["run", "small.toml", "--set", "training.lr"], "key=value"),
        (["run", "small.toml", "--seeds", "a"], "--seeds"),
        (["run", "small.toml", "--method", "fedvsl"], "fedvls"),
        (["run", "small.toml", "--device", "tpu"], "engine.device"),
        (["run", "small.toml", "--set", "data.name=mnist"], "FEDSKEW_DATA"),
        (["run", "small.toml", "--set", "data.name=mnist", "--data-root", "nowhere"], "nowhere"),
        (["report", "nowhere"], "not a run folder"),
        (["describe", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(config, tmp_path, command, words, says):
    done = command(*words, cwd=tmp_path, FEDSKEW_DATA="")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback(config, tmp_path):
    assert "Traceback" in fedskew("--debug", "run", "none.toml", cwd=tmp_path).stderr


def test_a_second_run_does_not_write_over_the_first(config, tmp_path):
    fedskew("run", config, cwd=tmp_path)
    again = fedskew("run", config, cwd=tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert fedskew("run", config, "--resume", cwd=tmp_path).returncode == 0


def test_control_c_stops_after_a_checkpoint_and_resume_ends_the_run(config, tmp_path):
    config.write_text(CONFIG.replace("rounds = 2", "rounds = 400"))
    command = [sys.executable, "-m", "fedskew", "run", str(config)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("runs/*/checkpoint/state.safetensors")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert "--resume" in out
    assert "Traceback" not in err
    done = fedskew("run", config, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (records,) = tmp_path.glob("runs/*/rounds.jsonl")
    assert len(records.read_text().splitlines()) == 401


COMMANDS = ["run", "sweep", "recipes", "reproduce", "report", "methods", "demo", "describe", "weights"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_in_its_help(name, command, tmp_path):
    done = command(name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Example" in done.stdout
    assert f"fedskew {name}" in done.stdout
