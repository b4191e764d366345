"""The commands that train and report, as a person types them."""

import pytest
from typer.main import get_command

from fedskew.cli import app
from fedskew.errors import ConfigError


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


COMMANDS = get_command(app).commands
NAMES = [(name,) for name in COMMANDS if name != "deploy"] + [("deploy", name) for name in COMMANDS["deploy"].commands]


@pytest.mark.parametrize("names", NAMES)
def test_every_command_shows_an_example_a_line_in_its_help(names, command):
    done = command(*names, "--help")
    assert "Example" in done.stdout
    said = f"fedskew {' '.join(names)}"
    assert max(line.count(said) for line in done.stdout.splitlines()) == 1
