"""`fedskew sweep` and `fedskew arena` as a person uses them: stopped, gone on with, and told mistakes."""

import csv
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedskew.arena import Arena
from fedskew.experiment import Sweep, run_sweep
from fedskew.papers import config_file

CONFIG = """\
name = "small"
data = {name = "digits"}
partition = {rule = "quantity", clients = 10, labels_per_client = 3}
model = {name = "mlp3"}
training = {rounds = 40, participation = 0.5, batch_size = 16, momentum = 0.9}
[sweep]
accuracy = 0.8
methods = [{label = "short", preset = "fedla", set = {training.rounds = 4}}, "fedentopt+fedprox"]
"""
OWN = """\
from dataclasses import dataclass


@dataclass(frozen=True)
class Lost:
    needs_target = False
    def weigh(self, answered):
        raise KeyError("way")
"""
COMMAND = (sys.executable, "-m", "fedskew", "sweep", "small.toml", "--processes", "2")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(CONFIG)
    return tmp_path


def started(cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(COMMAND, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rounds(cwd: Path) -> int:
    """Lines on disk of the long run."""
    return sum(len(path.read_text().splitlines()) for path in cwd.glob("runs/small-fedentopt*/rounds.jsonl"))


def short(cwd: Path) -> Path:
    """The folder of the short run."""
    return next(cwd.glob("runs/small-short-*"), cwd / "not yet")


def wait_until(condition, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.005)
    assert process.returncode is None, process.communicate()


def is_finished(folder: Path) -> bool:
    return (folder / "summary.json").exists() and (folder / "report.html").exists()


def said_in(out: str) -> list[str]:
    """Lines that do not depend on time: how much is left is said every 30 seconds."""
    return [line for line in out.splitlines() if not line.endswith(" left")]


def state_of(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def tables(cwd: Path) -> dict[str, list]:
    """The sweep's tables without their last columns: seconds, and why a run failed."""
    (folder,) = cwd.glob("runs/sweep-small-*")
    with (folder / "table.csv").open() as cells, (folder / "runs.csv").open() as runs:
        plain = {"cells": [line[:-2] for line in csv.reader(cells)], "runs": [line[:-2] for line in csv.reader(runs)]}
    text = [line.rsplit("|", 2)[0] for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]
    return plain | {"text": text}


@pytest.mark.slow
@pytest.mark.faults
def test_a_sweep_killed_and_stopped_in_the_middle_does_only_what_is_missing_and_ends_with_the_same_tables(
    home, command
):
    with started(home) as process:
        wait_until(lambda: rounds(home) >= 10 and is_finished(short(home)), process)
        process.send_signal(signal.SIGKILL)
    while (killed := rounds(home)) != (time.sleep(0.5), rounds(home))[1]:
        pass  # its workers notice, and end too
    assert 10 <= killed < 41
    before = state_of(short(home))

    with started(home) as process:
        wait_until(lambda: rounds(home) >= killed + 5, process)
        process.send_signal(signal.SIGINT)  # to this process alone; a terminal sends it to its workers as well
        out, err = process.communicate()
    assert process.returncode == 130
    assert said_in(out) == ["1 of 2 runs are finished already", "stopped; run the same command again to continue"]
    assert err == ""
    assert killed < rounds(home) < 41

    done = command(*COMMAND[3:])
    first, second, *_ = said_in(done.stdout)
    assert first == "1 of 2 runs are finished already"
    assert second.startswith("2 of 2 runs  fedentopt+fedprox, seed 0: accuracy ")
    assert state_of(short(home)) == before

    (home / "whole").mkdir()
    whole = run_sweep(Sweep.read(home / "small.toml"), home / "whole" / "runs", processes=1)
    assert tables(home) == tables(home / "whole")
    for model in home.glob("runs/small-*/model.safetensors"):
        assert model.read_bytes() == (home / "whole" / model.relative_to(home)).read_bytes()
    assert f"runs/{whole.folder.name}/report.html" in done.stdout


@pytest.mark.slow
def test_a_failed_run_is_one_line_at_the_end_and_exit_status_1(home, command):
    (home / "own.py").write_text(OWN)
    methods = "sweep.methods=[{label = 'lost', weighting = 'own:Lost'}]"
    done = command("sweep", "small.toml", "--seeds", "3", "--set", methods, status=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "failed: lost, seed 3: round 1: weighting own:Lost: weigh() failed: KeyError: 'way' (own.py, line 8)"
    )
    assert "1 of 1 run  lost, seed 3: failed" in done.stdout
    assert "Missing, as it failed: lost, seed 3: round 1: weighting own:Lost: weigh() failed" in done.stdout
    assert "report:" not in done.stdout
    (table,) = home.glob("runs/sweep-small-*/table.md")
    assert "| lost | 0 of 1 | - |" in table.read_text()
    assert "Missing, as it failed: lost, seed 3: round 1: weighting own:Lost" in table.read_text()
    assert "weighting own:Lost" in table.with_name("runs.csv").read_text()


@pytest.mark.slow
def test_a_refused_combination_is_said_at_once_and_at_the_end_and_exit_status_1(home, command):
    words = ("--set", "sweep.methods=['fedavg', 'fedla+fedpals']", "--set", "training.rounds=1")
    done = command("sweep", "small.toml", *words, status=1)
    reason = "method.preset: 'fedla' and 'fedpals' both fill the weighting slot"
    first, second, *_ = said_in(done.stdout)
    assert first.startswith("refused, while the others run: fedla+fedpals: ")
    assert reason in first
    assert second.startswith("1 of 1 run  fedavg, seed 0: accuracy ")
    (line,) = done.stderr.splitlines()
    assert line.startswith("refused: fedla+fedpals: ")
    assert reason in line


@pytest.mark.slow
def test_the_estimate_comes_after_what_is_refused(home, command):
    (home / "own.py").write_text(OWN)
    methods = "sweep.methods=['fedpals', {label = 'lost', weighting = 'own:Lost'}]"
    words = ("sweep", "small.toml", "--set", "training.rounds=1000000", "--set", methods)
    refused, estimate, *_ = said_in(command(*words, status=1).stdout)
    assert refused.startswith("refused, while the others run: fedpals: ")
    assert estimate.startswith("Time: about ")
    assert command(*words, "--estimate").stdout.startswith("Time: about ")


# `fedskew arena` as a person uses it: stopped, gone on with, asked for a part, and told mistakes.


FILE = """
name = "small"
seeds = [0, 1]
data = {name = "digits", rows = 200}
partition = {rule = "iid", clients = 3}
model = {name = "logistic"}
training = {rounds = 2}
engine = {backend = "cohort", seeds_together = true}
[sweep]
methods = ["fedavg", "fedla"]
[sweep.grid]
training.participation = [0.4, 1.0]
[arena]
"""


@pytest.mark.slow
def test_an_arena_is_gone_on_with_and_says_where_everything_is(tmp_path, command):
    (tmp_path / "small.toml").write_text(FILE)
    first = command("arena", "small.toml", "--only", "participation=1.0", "--processes", "1")
    assert "4 of 4 runs: runs/arena-small/runs.csv; table.md" in first.stdout
    assert "paired on the same partition and seed" in first.stdout
    second = command("arena", "small.toml", "--processes", "1")
    assert "4 of 8 runs are there already" in second.stdout
    assert "8 of 8 runs" in second.stdout
    folder = tmp_path / "runs" / "arena-small"
    with (folder / "runs.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 8
    page = (folder / "table.md").read_text()
    assert "## At equal traffic" in page
    assert "| fedla | 2 | 2 |" in page
    command("arena", "small.toml", "--tables")
    assert (folder / "table.md").read_text() == page


def test_what_is_missing_is_estimated(tmp_path, command):
    (tmp_path / "small.toml").write_text(FILE)
    assert command("arena", "small.toml", "--estimate").stdout == "Time: about a minute at most.\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_arena_that_ships_can_be_read():
    quick = Arena.read(config_file("arena"), quick=True)
    assert quick.settings.reference == "fedavg"
    assert len({entry.method for entry in quick.entries}) == 3
    whole = Arena.read(config_file("arena"), {"sweep.grid.training.participation": [0.2]})
    assert len({entry.method for entry in whole.entries}) >= 9
    assert tomllib.loads(config_file("arena").read_text())["name"] == whole.name


@pytest.mark.slow
def test_where_all_is_refused_the_reason_is_said(tmp_path, command):
    (tmp_path / "small.toml").write_text(FILE + "[target]\nmix = [0.5, 0.5]\n")
    done = command("arena", "small.toml", "--processes", "1", status=1)
    assert "Nothing can be compared with fedavg yet." in done.stdout
    assert done.stderr.count("refused: target.mix: must have the shape (10,)") == done.stderr.count("refused") == 1
