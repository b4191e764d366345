"""`fedskew report` tells runs of one name apart: by what differs in their configs, or as it is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.cli.conftest import Command

DIGITS = """
name = "lr"
data = {name = "digits"}
partition = {rule = "iid", clients = 2}
model = {name = "logistic"}
training = {rounds = 1}
"""


def labels_of(page: Path) -> list[str]:
    """The runs of a page, as its script lists them."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r'"label":"([^"]*)"', text[text.index('id="figures"') :])


@pytest.fixture
def two(tmp_path: Path, command: Command) -> Path:
    """Two learning rates under one name, of which one has two seeds."""
    (tmp_path / "lr.toml").write_text(DIGITS)
    command("run", "lr.toml", "--set", "training.lr=0.1", cwd=tmp_path)
    command("run", "lr.toml", "--set", "training.lr=0.5", "--seeds", "0,1", cwd=tmp_path)
    return tmp_path


def test_labels_come_from_what_differs(two: Path, command: Command) -> None:
    runs = sorted(map(str, two.glob("runs/lr-*")))
    command("report", *runs, cwd=two)
    assert sorted(labels_of(two / "report.html")) == ["lr, lr=0.1", "lr, lr=0.5"]
    command("report", "runs", "--out", "all.html", cwd=two)
    assert sorted(labels_of(two / "all.html")) == ["lr, lr=0.1", "lr, lr=0.5"]


def test_labels_are_taken_as_given(two: Path, command: Command) -> None:
    one, other = sorted(map(str, two.glob("runs/lr-*")))
    command("report", f"a=b={one}", f"large={other}", cwd=two, status=2)
    command("report", f"small={one}", f"large={other}", cwd=two)
    assert labels_of(two / "report.html") == ["small", "large"]
    command("report", one, other, "--label", "x=1", "--label", "y", cwd=two)
    assert labels_of(two / "report.html") == ["x=1", "y"]
    few = command("report", one, other, "--label", "x", cwd=two, status=2)
    assert few.stderr == "fedskew: --label: given 1 times for 2 runs; give one for each\n"
    twice = command("report", one, one, cwd=two, status=2)
    assert "has seed 0 twice; give each configuration its own label (fedskew report LABEL=RUN ...)" in twice.stderr


def test_methods_and_values_in_one_folder_are_compared(tmp_path: Path, command: Command) -> None:
    (tmp_path / "lr.toml").write_text(DIGITS)
    for rate in ("0.1", "0.5"):
        words = ["--method", "fedavg", "--method", "fedla", "--set", f"training.lr={rate}", "--out", "all"]
        command("run", "lr.toml", *words, cwd=tmp_path)
    command("report", "all", cwd=tmp_path)
    methods = [f"lr-{method}, lr={rate}" for method in ("fedavg", "fedla") for rate in ("0.1", "0.5")]
    assert sorted(labels_of(tmp_path / "report.html")) == methods
