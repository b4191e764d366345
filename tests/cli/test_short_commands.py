"""`fedskew methods`: what there is, and one of them in a page."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console

import fedskew
from common import task
from fedskew.arena import Trained
from fedskew.cli.progress import ArenaProgressBar
from fedskew.experiment import RunBar, resolve
from fedskew.methods import PLACES, PRESETS
from fedskew.methods.catalogue import COMBINATIONS

NAMES = sorted({*PRESETS, *COMBINATIONS, *(name for index in PLACES.values() for name in index)})


def test_the_list_names_every_preset_and_component_and_what_does_not_go_together_within_80_columns(tmp_path, command):
    done = command("methods", COLUMNS="80")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert set(NAMES) - set(COMBINATIONS) <= set(done.stdout.replace(",", " ").split())
    flat = " ".join(done.stdout.split())
    for text in ("NeurIPS 2020", "buffer=0.5", "+1 forward, +1 backward", "C up once", "fedentopt+fedprox"):
        assert text in flat
    assert "server_update.fednova is refused with local_step.scaffold" in flat
    assert "selection.fedentopt conflicts with weighting.fedpals" in flat


def test_one_in_a_page(tmp_path, command):
    done = command("methods", "fedprox", COLUMNS="80")
    for text in ("MLSys 2020", "(mu / 2) ||theta - w||^2", "mu = 0.01", 'preset = "fedprox"', "Goes with", "square"):
        assert text in done.stdout


def test_json_is_for_programs(tmp_path, command):
    tree = json.loads(command("methods", "fedvls", "--json").stdout)
    assert [one["name"] for one in tree["components"]] == ["fedvls_calibration", "vacant_distillation", "suppression"]
    assert tree["preset"]["cost"]["forward"] == 1


README = Path(__file__).resolve().parents[2] / "README.md"


def test_a_run_that_is_there_is_said_before_another_trains(digits, tmp_path, command):
    words = ["run", "my.toml", "--method", "fedavg"]
    command(*words, "--method", "fedla")
    done = command("run", "my.toml", "--method", "fedprox", "--method", "fedla", status=2)
    assert "this run is there already; add --resume" in done.stderr
    assert not list(tmp_path.glob("runs/my-fedprox-*"))
    command(*words, "--method", "fedla", "--resume")
    command(*words, "--method", "fedla", "--fresh")


def test_the_readme_s_sequence_works(tmp_path, command):
    lines = re.findall(r"^    fedskew ((?:new|run) my.toml.*?) +#", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    for line, more in zip(lines, ([], ["--set", "training.rounds=1"]), strict=True):
        command(*line.split(), *more)
    assert (tmp_path / "runs" / "my.html").exists()


# `fedskew recipes` and `fedskew reproduce` as a person uses them.


@pytest.mark.slow
def test_the_list_says_which_data_is_there(tmp_path, command):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / name).touch()
    done = command("recipes", FEDSKEW_DATA=str(tmp_path))
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("fedentopt-table1"))
    assert "CIFAR-10 ✓, CINIC-10 ✗, CIFAR-100 ✗" in line
    assert " 360 " in line  # 120 rows of 3 seeds


@pytest.mark.slow
def test_a_recipe_is_shown_with_what_deviates_and_a_row_can_be_run(tmp_path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    done = command("recipes", "fedpals-fig9")
    assert "Differs from the paper: learning rate, batch, rounds and local epochs are not stated" in done.stdout
    words = ("recipes", "fedpals-fig9", "--rows", "0.5,fedpals", "--config")
    (tmp_path / "my.toml").write_text(command(*words).stdout, encoding="utf-8")
    command("run", "my.toml", "--set", "training.rounds=1", "--seeds", "0")


@pytest.mark.slow
def test_a_figure_is_run_drawn_with_a_note_on_changes_and_runs_are_used_again(tmp_path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    words = ("reproduce", "fedpals-fig9", "--rows", "0.5", "--rounds", "2", "--seeds", "0")
    done = command(*words, "--processes", "1")
    assert "2 of 2 runs" in done.stdout
    changed = "2 of 10 rows; seeds = [0] instead of [0, 1, 2, 3, 4]; training.rounds = 2"
    assert f"Changed from the recipe: {changed}" in done.stdout
    (figure,) = tmp_path.glob("runs/sweep-fedpals-fig9-*/figure.png")
    assert figure.stat().st_size > 5000
    assert "2 of 2 runs are finished already" in command(*words).stdout
    page = next(tmp_path.glob("runs/sweep-fedpals-fig9-*/comparison.md")).read_text(encoding="utf-8")
    assert "fedskew reproduce fedpals-fig9 --rows 0.5 --rounds 2 --seeds 0" in page


# `--resume` goes on with a run, and starts none where there is none to go on with.

POWER = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Power:
    power: float = DEFAULT

    def weigh(self, answered):
        raw = answered.sizes**self.power
        return raw / raw.sum()
"""


@pytest.fixture
def home(tmp_path, digits):
    text = digits.read_text().replace('"my"', '"task"') + 'method = {weighting = {name = "powers:Power"}}\n'
    (tmp_path / "task.toml").write_text(text)
    (tmp_path / "powers.py").write_text(POWER.replace("DEFAULT", "0.5"))
    return tmp_path


@pytest.mark.slow
def test_after_a_changed_default_the_nearest_run_and_the_difference_are_named(home, command):
    command("run", "task.toml")
    (folder,) = (home / "runs").iterdir()
    command("run", "task.toml", "--resume")
    sys.modules.pop("powers")
    (home / "powers.py").write_text(POWER.replace("DEFAULT", "0.75"))
    done = command("run", "task.toml", "--resume", status=2)
    assert f"runs/{folder.name} differs in method.weighting.power (0.5 there, 0.75 here)" in done.stderr
    assert [path.name for path in (home / "runs").iterdir()] == [folder.name]


@pytest.mark.slow
def test_of_several_runs_those_that_are_there_go_on_and_the_others_begin(home, command):
    command("run", "task.toml", "--method", "fedavg")
    command("run", "task.toml", "--method", "fedavg", "--method", "fedla", "--resume")
    assert len(list((home / "runs").glob("*/model.safetensors"))) == 2


def test_a_run_that_is_stopped_before_it_writes_is_begun_anew_and_not_resumed(digits, command, monkeypatch):
    with monkeypatch.context() as here:
        here.setattr("fedskew.experiment._simulate.make_training_loop", Mock(side_effect=KeyboardInterrupt))
        assert "stopped; nothing is written yet; run it again" in command("run", "my.toml", status=130).stdout
    command("run", "my.toml")
    with monkeypatch.context() as here:
        here.setattr("fedskew.experiment._simulate.try_out", Mock(side_effect=KeyboardInterrupt))
        assert "stopped; nothing is written yet" in command("run", "my.toml", "--fresh", status=130).stdout


# Where output is no terminal, progress is a line now and then, with the time left.

PROGRESS_CONFIG = resolve(task(10, rounds=3) | {"name": "digits", "evaluation": {"every": 2}})


def printed(every: float, configs=(PROGRESS_CONFIG,)) -> list[str]:
    console = Console(file=io.StringIO(), width=60)
    with RunBar(console, configs, every=every) as bar:
        for config in configs:
            fedskew.simulate(config, progress=bar.start(config))
    return progress_in(console)


def at_times() -> tuple[Console, list[float]]:
    """A console that is no terminal, and the time that it is there."""
    clock = [0.0]
    return Console(file=io.StringIO(), width=60, get_time=lambda: clock[0]), clock


def progress_in(console: Console) -> list[str]:
    """The lines of progress, without what a run says of itself once."""
    return [line for line in console.file.getvalue().splitlines() if "rounds" in line]


def test_each_line_says_what_is_done_how_good_it_is_and_how_long_it_will_take():
    lines = printed(0.0, (PROGRESS_CONFIG, PROGRESS_CONFIG.with_method("fedla")))
    assert len(lines) == 5
    assert re.fullmatch(r"digits: 1 of 6 rounds  seed 0  accuracy 0\.\d{3}, \.\.\. left", lines[0])
    assert re.fullmatch(r"digits: 2 of 6 rounds  seed 0  accuracy 0\.\d{3}, about \d+ s left", lines[1])
    assert lines[-1].startswith("digits-fedla: 5 of 6 rounds  seed 0  accuracy ")


def test_a_short_run_prints_none():
    assert printed(30.0) == []


def test_what_the_first_round_waited_for_is_not_taken_for_the_pace_of_the_others():
    console, clock = at_times()
    bar = RunBar(console, [PROGRESS_CONFIG.with_value("training.rounds", 100)], every=30.0)
    listen = bar.start(PROGRESS_CONFIG.with_value("training.rounds", 100))
    for round, clock[0] in ((1, 31.0), (2, 31.5), (3, 62.0)):
        listen({"round": round, "seed": 0, "evaluation": None, "seconds": 0.5})
    assert progress_in(console) == ["digits: 1 of 100 rounds, ... left", "digits: 3 of 100 rounds, about 25 min left"]


def test_records_of_a_resumed_run_which_come_at_once_do_not_shorten_the_time_left():
    console = Console(file=io.StringIO(), width=60)
    listen = RunBar(console, [PROGRESS_CONFIG], every=0.0).start(PROGRESS_CONFIG)
    for round in (1, 2):
        listen({"round": round, "seed": 0, "evaluation": None, "seconds": 600.0})
    assert progress_in(console) == ["digits: 1 of 3 rounds, ... left", "digits: 2 of 3 rounds, about 10 min left"]


def test_runs_of_an_arena_that_end_together_share_the_time_that_they_took():
    console, clock = at_times()
    bar = ArenaProgressBar(console, every=60.0)
    bar.begin(0, 256)
    for clock[0] in (640.0, 1280.0):
        bar.ended([(SimpleNamespace(name=f"job {number}"), Trained({}, {})) for number in range(8)], 64)
    bar.stop()
    assert console.file.getvalue().splitlines() == ["64 of 256 runs, ... left", "128 of 256 runs, about 21 min left"]


def test_runs_of_an_arena_that_become_necessary_are_more_in_all():
    console, clock = at_times()
    bar = ArenaProgressBar(console, every=60.0)
    bar.begin(0, 11)
    for clock[0], runs in ((70.0, 3), (80.0, -3), (140.0, 3), (210.0, 2)):  # six end, of which three ask for six more
        bar.ended([(SimpleNamespace(name="job"), Trained({}, {}))], runs)
    bar.stop()
    # The pace is that of all since the first, 28 s a run at the end.
    said = ["3 of 11 runs, ... left", "6 of 14 runs, about 3 min left", "8 of 14 runs, about 3 min left"]
    assert console.file.getvalue().splitlines() == said
