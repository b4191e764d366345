"""Configs that come with fedskew are run by name; a run of minutes says before it starts how long it takes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from tests.cli.conftest import Command

from fedskew.papers import config_file, config_names

DIGITS = """
name = "digits"
data = {name = "digits", validation = 0.2}
partition = {rule = "iid", clients = 4}
model = {name = "logistic"}
"""


def test_every_config_that_ships_is_named_and_found() -> None:
    repository = Path(__file__).resolve().parents[2]
    assert config_names() == tuple(sorted(path.stem for path in (repository / "recipes").glob("*.toml")))
    assert all("data" in tomllib.loads(config_file(name).read_text()) for name in config_names())


@pytest.mark.slow
def test_a_config_that_ships_runs_by_name(tmp_path: Path, command: Command) -> None:
    done = command("run", "@fedpals-synthetic", "--set", "training.rounds=1", "--seeds", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Time:" not in done.stdout
    assert [path.name.rsplit("-", 1)[0] for path in (tmp_path / "runs").iterdir()] == ["fedpals-synthetic"]
    assert command("counts", "@fedpals-synthetic", cwd=tmp_path).stdout.startswith("client,")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("@fedvls-mnist-dir0.06", "no config of this name comes with fedskew (did you mean 'fedvls-mnist-dir0.05'?)"),
        ("@fedvls-table1", "is a table or figure of a paper; use: fedskew reproduce fedvls-table1"),
        ("@compare", "use: fedskew sweep"),
    ],
)
def test_a_wrong_name_is_one_line(tmp_path: Path, command: Command, name: str, message: str) -> None:
    done = command("run", name, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_estimate_trains_nothing(tmp_path: Path, command: Command) -> None:
    (tmp_path / "short.toml").write_text(f"{DIGITS}training = {{rounds = 2}}\n")
    (tmp_path / "long.toml").write_text(f"{DIGITS}training = {{rounds = 1_000_000, epochs = 5}}\n")
    assert command("run", "short.toml", "--estimate", cwd=tmp_path).stdout == "Time: about a minute at most.\n"
    said = command("run", "long.toml", "--estimate", cwd=tmp_path).stdout
    assert said.startswith("Time: about ")
    assert said.endswith(" h, one run after another on this machine's CPU (from some measured steps).\n") or (
        " days, one run after another" in said
    )
    assert not (tmp_path / "runs").exists()


def test_a_long_run_says_before_it_starts_how_long_it_takes(tmp_path: Path, command: Command) -> None:
    (tmp_path / "long.toml").write_text(
        f"{DIGITS}training = {{rounds = 1_000_000, lr = 1e-30}}\nevaluation = {{patience = 1}}\n"
    )
    said = command("run", "long.toml", cwd=tmp_path).stdout
    assert said.index("Time: about ") < said.index("accuracy")
