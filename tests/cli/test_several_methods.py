"""`fedskew run` with several methods: nothing is trained where one of them can't be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.conftest import Command

README = Path(__file__).resolve().parents[2] / "README.md"
DIGITS = """
name = "my"
data = {name = "digits"}
partition = {rule = "iid", clients = 10}
model = {name = "logistic"}
training = {rounds = 1}
"""


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("fedentopt", ["'my-fedentopt'", "method.selection.buffer: 0.5", "training.participation = 0.5"]),
        ("fedpals", ["'my-fedpals'", "FedPALS", "set [target] mix"]),
        ("adapt", ["'my-adapt'", "method.finish: adapt needs a target"]),
    ],
)
def test_every_method_is_checked_before_the_first_one_trains(
    method: str, says: list[str], tmp_path: Path, command: Command
) -> None:
    (tmp_path / "my.toml").write_text(DIGITS)
    done = command("run", "my.toml", "--method", "fedavg", "--method", method, cwd=tmp_path, status=2)
    assert (done.stderr.count("\n"), done.stdout) == (1, "")
    assert all(words in done.stderr for words in says), done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_there_is_said_before_another_trains(tmp_path: Path, command: Command) -> None:
    (tmp_path / "my.toml").write_text(DIGITS)
    words = ["run", "my.toml", "--method", "fedavg"]
    command(*words, "--method", "fedla", cwd=tmp_path)
    done = command("run", "my.toml", "--method", "fedprox", "--method", "fedla", cwd=tmp_path, status=2)
    assert "this run is there already; add --resume" in done.stderr
    assert not list(tmp_path.glob("runs/my-fedprox-*"))
    command(*words, "--method", "fedla", "--resume", cwd=tmp_path)
    command(*words, "--method", "fedla", "--fresh", cwd=tmp_path)


def test_the_readme_s_sequence_works(tmp_path: Path, command: Command) -> None:
    lines = re.findall(r"^    fedskew ((?:new|run) my.toml.*?) +#", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    for line, more in zip(lines, ([], ["--set", "training.rounds=1"]), strict=True):
        command(*line.split(), *more, cwd=tmp_path)
    assert (tmp_path / "runs" / "my.html").exists()
