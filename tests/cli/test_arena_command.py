"""`fedskew arena` as a person uses it: stopped, gone on with, asked for a part, and told mistakes."""

import csv
import tomllib

import pytest

from fedskew.arena import Arena
from fedskew.papers import config_file

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
