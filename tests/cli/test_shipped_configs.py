"""Configs that come with fedskew are run by name; a run of minutes says before it starts how long it takes."""

import tomllib
from pathlib import Path

import pytest

from fedskew.papers import config_file, config_names


def test_every_config_that_ships_is_named_and_found():
    repository = Path(__file__).resolve().parents[2]
    assert config_names() == tuple(sorted(path.stem for path in (repository / "recipes").glob("*.toml")))
    assert all("data" in tomllib.loads(config_file(name).read_text()) for name in config_names())


@pytest.mark.slow
def test_a_config_that_ships_runs_by_name(tmp_path, command):
    done = command("run", "@fedpals-synthetic", "--set", "training.rounds=1", "--seeds", "0")
    assert "Time:" not in done.stdout
    assert [path.name.rsplit("-", 1)[0] for path in (tmp_path / "runs").iterdir()] == ["fedpals-synthetic"]
    assert command("counts", "@fedpals-synthetic").stdout.startswith("client,")


def test_an_estimate_trains_nothing(tmp_path, digits, command):
    assert command("run", digits, "--estimate").stdout == "Time: about a minute at most.\n"
    said = command("run", digits, "--estimate", "--set", "training={rounds=1_000_000,epochs=5}").stdout
    assert said.startswith("Time: about ")
    assert " h, one run after another" in said or " days, one run after another" in said
    assert not (tmp_path / "runs").exists()


def test_a_long_run_says_before_it_starts_how_long_it_takes(digits, command):
    changes = ("training={rounds=1_000_000,lr=1e-30}", "data.validation=0.2", "evaluation.patience=1")
    said = command("run", digits, *(word for change in changes for word in ("--set", change))).stdout
    assert said.index("Time: about ") < said.index("accuracy")


TABLE = """
name = "table"
data = {name = "csv", root = "table.csv"}
partition = {rule = "iid", clients = 2}
training = {rounds = 10, epochs = 100, batch_size = 16, lr = 1e-30}
evaluation = {every = 10}
"""


def write_table(folder: Path) -> None:
    rows = [f"{at % 7},{at % 5},1,{at % 3},{'yes' if at % 2 else 'no'}" for at in range(40)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,d,label", *rows]))


@pytest.mark.parametrize(("name", "more"), [("run", ""), ("sweep", '[sweep]\nmethods = ["fedavg"]')])
def test_the_time_of_a_table_of_numbers_is_estimated(tmp_path, command, name, more):
    write_table(tmp_path)
    (tmp_path / "table.toml").write_text(f'model = {{name = "logistic"}}\n{TABLE}{more}')
    done = command(name, "table.toml", "--estimate", "--set", "training.rounds=10000000")
    assert done.stdout.startswith("Time: about ")


@pytest.mark.slow
def test_an_estimate_that_fails_stops_no_run(tmp_path, command):
    write_table(tmp_path)
    (tmp_path / "picky.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self, num_classes, in_shape):\n        super().__init__()\n"
        "        self.linear = nn.Linear(4, num_classes)\n\n"
        "    def forward(self, x):\n        if x[0, 2] != 0:\n            raise ValueError('not my data')\n"
        "        return self.linear(x)\n"
    )
    (tmp_path / "table.toml").write_text(f'model = {{name = "picky:Net"}}\n{TABLE}')
    said = "Time: unknown; measuring a few steps failed: "
    estimate = command("run", "table.toml", "--estimate")
    assert (estimate.returncode, estimate.stdout.count("\n")) == (0, 1)
    assert estimate.stdout.startswith(said)
    assert said in command("run", "table.toml").stdout
