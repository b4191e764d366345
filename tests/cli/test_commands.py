"""The commands that train and report, as a person types them, and the configs that come with fedskew."""

import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from fedskew.cli import app
from fedskew.errors import ConfigError
from fedskew.papers import config_file, config_names


def test_run_trains_and_says_where_the_report_is(digits, tmp_path, command):
    done = command("run", digits, "--seeds", "0,1", "--set", "training.lr=0.1")
    assert "accuracy" in done.stdout
    assert "±" in done.stdout
    (page,) = (tmp_path / "runs").glob("my-*/report.html")
    assert str(page.relative_to(tmp_path)) in done.stdout


@pytest.mark.slow
def test_starting_over_from_a_run_folders_config_writes_to_that_folder(digits, tmp_path, command):
    command("run", digits, "--out", "mine")
    (stored,) = (tmp_path / "mine").glob("my-*/config.toml")
    done = command("run", stored, "--fresh")
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "mine" / "earlier" / f"{stored.parent.name}.1").is_dir()
    assert f"the earlier run is now in {tmp_path}/mine/earlier/{stored.parent.name}.1\n" in done.stdout


WEIGHTING = """\
from dataclasses import dataclass

@dataclass(frozen=True)
class Own:
    needs_target = False

    def weigh(self, answered):
        return answered.sizes ** {power} / (answered.sizes ** {power}).sum()
"""


@pytest.mark.slow
def test_a_replay_under_edited_code_is_said_to_be_none(digits, tmp_path, command, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_power.py").write_text(WEIGHTING.format(power=0.5))
    command("run", digits, "--set", "method.weighting=own_power:Own")
    (stored,) = (tmp_path / "runs").glob("my-*/config.toml")
    words = f"not a repetition: since the run in {stored.parent}, your code changed (own_power.py)"
    assert "not a repetition" not in command("run", stored, "--out", "again").stdout
    (tmp_path / "own_power.py").write_text(WEIGHTING.format(power=0.2))
    assert words in command("run", stored, "--out", "third").stdout


def test_run_says_the_whole_objective_and_the_target(digits, tmp_path, command):
    extra = 'method.objective.extra_terms=[{name = "fedntd", weight = 1}]'
    told = ("--set", "target.mix=uniform")
    done = command("run", digits, "--set", "method.preset=fedlc", "--set", extra, *told)
    assert "my minimises fedlc + 1 fedntd" in done.stdout
    assert "target: all classes alike; the weighting does not use it" in done.stdout


@pytest.mark.slow
def test_quick_says_how_much_smaller_it_is_and_that_it_proves_nothing(digits, tmp_path, command):
    digits.write_text(digits.read_text().replace("rounds = 1", "rounds = 2") + '[quick]\n"training.rounds" = 1\n')
    done = command("run", digits, "--quick")
    words = " ".join(done.stdout.split())
    assert "--quick: 1 round of 2. This shows that everything works, and proves nothing" in words
    assert done.stdout.index("my ") < done.stdout.index("--quick: ")
    assert "--quick" not in command("run", digits).stdout


def test_debug_shows_the_traceback(tmp_path, command):
    with pytest.raises(ConfigError, match="none.toml"):  # which the interpreter shows with its traceback
        command("--debug", "run", "none.toml")


def test_ctrl_c_before_a_command_does_anything_is_said(command, monkeypatch):
    monkeypatch.setattr("fedskew.cli.deploy.config_file", pressed)
    assert command("deploy", "local", "new", status=130).stderr == "stopped\n"
    monkeypatch.setattr("fedskew.cli.main", pressed)  # as while it is imported
    assert command("deploy", "local", "new", status=130).stderr == "stopped\n"


def pressed(*words: object) -> None:
    raise KeyboardInterrupt


COMMANDS = get_command(app).commands
NAMES = [(name,) for name in COMMANDS if name != "deploy"] + [("deploy", name) for name in COMMANDS["deploy"].commands]


@pytest.mark.parametrize("names", NAMES)
def test_every_command_shows_an_example_a_line_in_its_help(names, command):
    done = command(*names, "--help")
    assert "Example" in done.stdout
    said = f"fedskew {' '.join(names)}"
    assert max(line.count(said) for line in done.stdout.splitlines()) == 1


# Configs that come with fedskew are run by name; a run of minutes says before it starts how long it takes.


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
