"""The commands that train and report, as a person types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.main import get_command

from fedskew.cli import app
from fedskew.errors import ConfigError

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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_run_trains_and_says_where_the_report_is(config, tmp_path, command):
    done = command("run", config, "--seeds", "0,1", "--set", "training.lr=0.1")
    assert "accuracy" in done.stdout
    assert "±" in done.stdout
    (page,) = (tmp_path / "runs").glob("small-*/report.html")
    assert str(page.relative_to(tmp_path)) in done.stdout


@pytest.mark.slow
def test_starting_over_from_a_run_folders_config_writes_to_that_folder(config, tmp_path, command):
    command("run", config, "--quick", "--out", "mine")
    (stored,) = (tmp_path / "mine").glob("small-*/config.toml")
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
def test_a_replay_under_edited_code_is_said_to_be_none(config, tmp_path, command, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_power.py").write_text(WEIGHTING.format(power=0.5))
    command("run", config, "--quick", "--set", "method.weighting=own_power:Own")
    (stored,) = (tmp_path / "runs").glob("small-*/config.toml")
    words = f"not a repetition: since the run in {stored.parent}, your code changed (own_power.py)"
    assert "not a repetition" not in command("run", stored, "--out", "again").stdout
    (tmp_path / "own_power.py").write_text(WEIGHTING.format(power=0.2))
    done = command("run", stored, "--out", "third")
    assert words in done.stdout


def test_run_says_the_whole_objective_and_the_target(config, tmp_path, command):
    extra = 'method.objective.extra_terms=[{name = "fedntd", weight = 1}]'
    told = ("--set", "target.mix=uniform")
    done = command("run", config, "--quick", "--set", "method.preset=fedlc", "--set", extra, *told)
    assert "small minimises fedlc + 1 fedntd" in done.stdout
    assert "target: all classes alike; the weighting does not use it" in done.stdout


@pytest.mark.slow
def test_quick_says_how_much_smaller_it_is_and_that_it_proves_nothing(config, tmp_path, command):
    done = command("run", config, "--quick")
    words = " ".join(done.stdout.split())
    assert "--quick: 1 round of 2. This shows that everything works, and proves nothing" in words
    assert done.stdout.index("small ") < done.stdout.index("--quick: ")
    whole = command("run", config)
    assert "--quick" not in whole.stdout


@pytest.mark.slow
def test_several_methods_give_one_comparison_and_report_compares_folders(config, tmp_path, command):
    done = command("run", config, "--quick", "--method", "fedavg", "--method", "fedla")
    assert {"small-fedavg", "small-fedla"} <= set(done.stdout.split())
    assert (tmp_path / "runs" / "small.html").exists()
    folders = sorted((tmp_path / "runs").glob("small-*-*"))
    done = command("report", *folders, "--out", "both.html")
    assert "small-fedla" in (tmp_path / "both.html").read_text()


def test_debug_shows_the_traceback(tmp_path, command):
    with pytest.raises(ConfigError, match="none.toml"):  # which the interpreter shows with its traceback
        command("--debug", "run", "none.toml")


@pytest.mark.parametrize("name", [name for name in get_command(app).commands if name != "deploy"])
def test_every_command_shows_an_example_in_its_help(name, command, tmp_path):
    done = command(name, "--help")
    assert "Example" in done.stdout
    assert f"fedskew {name}" in done.stdout
