"""A run is its config, its code and its data: what has changed since is said, and nothing is lost."""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import fedskew
from common import task
from fedskew.errors import ConfigError, DataError, RunError
from fedskew.experiment import RunFolder, Sweep, read, run_sweep
from fedskew.files import locked

TASK = task(4, beta=0.5, rounds=2, participation=0.5, batch_size=32, lr=0.1) | {"name": "small"}
WEIGHTING = """\
from dataclasses import dataclass
import numpy as np
from {helper} import power

@dataclass(frozen=True)
class Own:
    needs_target = False

    def weigh(self, answered):
        weights = answered.sizes ** power()
        return weights / weights.sum()
"""
HELPER = "def power():\n    return 0.5\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write modules of a user's own into a folder that is importable, each test under names of its own."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()

    return write


@pytest.mark.slow
def test_an_edit_of_ones_own_code_or_of_what_it_imports_is_said_and_stops_a_resume(tmp_path, own):
    own("weights_a", WEIGHTING.format(helper="helper_a"))
    own("helper_a", HELPER)
    tree = {**TASK, "method": {"weighting": "weights_a:Own"}}
    result = fedskew.simulate(tree, out=tmp_path)
    before = {path: path.read_bytes() for path in result.folder.rglob("*") if path.is_file()}
    assert (result.folder / "code" / "weights_a.py").read_text() == WEIGHTING.format(helper="helper_a")
    assert (result.folder / "code" / "helper_a.py").exists()

    own("helper_a", "# The square root, as in the paper.\n" + HELPER)
    fedskew.simulate(tree, out=tmp_path, resume=True)
    own("helper_a", HELPER.replace("0.5", "2.0"))
    with pytest.raises(RunError, match=r"since this run, your code changed \(helper_a.py\); start over with --fresh"):
        fedskew.simulate(tree, out=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in result.folder.rglob("*") if path.is_file()} == before

    fedskew.simulate(tree, out=tmp_path, fresh=True)
    kept = tmp_path / "earlier" / f"{result.folder.name}.1"
    assert {path.relative_to(result.folder): content for path, content in before.items()} == {
        path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()
    }
    assert "2.0" in (result.folder / "code" / "helper_a.py").read_text()


SCRIPT = """\
from torch import nn
import numpy as np

SCALES = [1.0, 2.0]
POWER = np.float64(2.0)
twice = lambda values: values * 2

class Base(nn.Sequential):
    factor = 1.0
    def __init__(self, num_classes, in_shape):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
    def forward(self, inputs):
        return twice(super().forward(inputs)) * SCALES[0] ** POWER * self.factor

class Net(Base):
    factor = 3.0
"""


def started(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Run a script in a new process, as it were."""
    path.write_text(text, encoding="utf-8")
    script = ModuleType("__main__")
    script.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", script)
    exec(compile(text, path, "exec"), vars(script))
    return script


GIVEN = {
    "a class": lambda script: script.Net,
    "a network": lambda script: script.Net(10, (1, 8, 8)),
    "a partial": lambda script: partial(script.Net, in_shape=(1, 8, 8)),
    "a lambda": lambda script: eval("lambda num_classes: Net(num_classes, None)", vars(script)),
}


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        ("a class", "SCALES = [1.0", "SCALES = [5.0"),
        ("a class", "POWER = np.float64(2.0)", "POWER = np.float64(3.0)"),
        ("a class", "factor = 3.0", "factor = 9.0"),
        ("a class", "* self.factor", "/ self.factor"),
        *((given, "values * 2", "values * 4") for given in GIVEN),
    ],
)
def test_an_edit_of_a_script_counts_wherever_its_component_looks(tmp_path, monkeypatch, given, before, after):
    def run(name: str, text: str, **how: bool) -> None:
        torch.manual_seed(0)
        model = GIVEN[given](started(tmp_path / name, text, monkeypatch))
        fedskew.simulate({**TASK, "training": {"rounds": 0}}, model=model, out=tmp_path, **how)

    run("first.py", SCRIPT)
    run("second.py", "VALUE = []\n" + SCRIPT, resume=True)
    assert before in SCRIPT
    with pytest.raises(RunError, match=r"your code changed \(__main__.py\)"):
        run("third.py", SCRIPT.replace(before, after), resume=True)


SWEEP = """\
name = "swept"
seeds = [0, 1]
data = {{name = "csv", root = "{root}"}}
model = "logistic"
partition = {{rule = "quantity", clients = 4, labels_per_client = 2}}
training = {{rounds = 1, lr = 0.1}}
[sweep]
methods = ["fedavg"{more}]
"""


def table(path: Path, rows: int = 120, shift: float = 0.0) -> Path:
    rng = np.random.default_rng(0)
    lines = [f"{x:.4f},{y:.4f},{'abcd'[row % 4]}" for row, (x, y) in enumerate(rng.normal(size=(rows, 2)) + shift)]
    path.write_text("\n".join(["x,y,label", *lines]) + "\n", encoding="utf-8")
    return path


# The test part is drawn by the run's seed, or by the partition's.
@pytest.mark.parametrize(("change", "drawn"), [("rows are deleted", ""), ("a value is edited", ", seed = 7")])
def test_other_data_under_the_same_name_are_said_and_stop_resume_and_sweep(tmp_path, change, drawn):
    root = table(tmp_path / "own.csv")
    file = tmp_path / "swept.toml"
    text = SWEEP.format(root=root, more="").replace("seeds = [0, 1]", "seeds = [0]")
    file.write_text(text.replace("labels_per_client = 2", f"labels_per_client = 2{drawn}"), encoding="utf-8")
    fedskew.simulate(Sweep.read(file).cells[0].config, out=tmp_path / "runs")
    os.utime(root, (1, 1))  # copied anew: the same content at another time
    assert not run_sweep(Sweep.read(file), tmp_path / "runs").failures

    lines = root.read_text().splitlines()
    if change == "rows are deleted":
        lines = lines[:80]
    else:
        lines[5] = "9.0000" + lines[5][6:]
    root.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=r"since 1 of these 1 runs, your data changed \(such as fedavg, seed 0, in .*"):
        run_sweep(Sweep.read(file), tmp_path / "runs")
    config = next((tmp_path / "runs").glob("swept-*/config.toml"))
    with pytest.raises(RunError, match="since this run, your data changed; start over with --fresh"):
        fedskew.simulate(config, out=tmp_path / "runs", resume=True)


@pytest.mark.slow
def test_a_sweep_trains_anew_only_what_the_edit_concerns(tmp_path, own):
    own("weights_b", WEIGHTING.format(helper="helper_b"))
    own("helper_b", HELPER)
    root = table(tmp_path / "own.csv")
    file = tmp_path / "swept.toml"
    file.write_text(
        SWEEP.format(root=root, more=', {label = "mine", weighting = {name = "weights_b:Own"}}'), encoding="utf-8"
    )
    sweep, out = Sweep.read(file), tmp_path / "runs"
    for cell in sweep.cells:
        for seed in cell.config.seeds:
            fedskew.simulate(cell.config.for_seed(seed), out=out)
    folders = {path.parent: path.stat().st_mtime_ns for path in out.glob("*/summary.json")}
    own("helper_b", HELPER.replace("0.5", "3.0"))
    with pytest.raises(RunError, match=r"since 2 of these 4 runs, your code changed \(helper_b.py\) \(such as mine"):
        run_sweep(sweep, out)
    assert not run_sweep(sweep, out, processes=1, fresh=True).failures
    rewritten = {folder for folder, time in folders.items() if (folder / "summary.json").stat().st_mtime_ns != time}
    assert {folder.name.rpartition("-")[0] for folder in rewritten} == {"swept-mine"}
    assert len(list((out / "earlier").iterdir())) == 2
    assert not run_sweep(sweep, out).failures


DATA = """\
import numpy as np
import torch
from fedskew.data import ByteImages, Dataset

def mine():
    values = torch.from_numpy(np.load("FILE"))
    images = ByteImages(values, (0.5,), (0.2,)) if values.ndim > 2 else values
    labels = torch.arange(600) % 3
    scale = {"mean": (0.5,), "std": (0.2,)} if values.ndim > 2 else {}
    return Dataset("mine", images, labels, images, labels, ("a", "b", "c"), **scale)
"""


@pytest.mark.parametrize("shape", [(600, 4), (600, 1, 2, 2)], ids=["numbers", "bytes of images"])
def test_data_from_a_function_of_ones_own_are_compared_by_all_of_their_content(tmp_path, own, shape):
    values = np.random.default_rng(0).integers(0, 255, shape).astype(np.float32 if len(shape) == 2 else np.uint8)
    np.save(tmp_path / "values.npy", values)
    own("data_c", DATA.replace("FILE", str(tmp_path / "values.npy")))
    tree = {**TASK, "data": {"name": "data_c:mine"}, "training": {"rounds": 0}}
    fedskew.simulate(tree, out=tmp_path)
    result = fedskew.simulate(tree, out=tmp_path, resume=True)
    values[1, 0] += 1
    np.save(tmp_path / "values.npy", values)
    with pytest.raises(RunError, match="your data changed"):
        fedskew.simulate(result.config, out=tmp_path, resume=True)


def test_another_version_of_fedskew_and_a_folder_that_does_not_say_are_not_mixed(tmp_path):
    result = fedskew.simulate(TASK, out=tmp_path)
    path = result.folder / "identity.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"fedskew": "0.0.1"}))
    with pytest.raises(RunError, match=f"since this run, fedskew was 0.0.1 and is {said['fedskew']}; start over"):
        fedskew.simulate(TASK, out=tmp_path, resume=True)
    for damage in ("", "[]", '{"code": 3}'):
        path.write_text(damage)
        with pytest.raises(RunError, match="identity.json: damaged"):
            fedskew.simulate(TASK, out=tmp_path, resume=True)
    path.unlink()
    with pytest.raises(RunError, match="identity.json: missing, so it can't be told"):
        fedskew.simulate(TASK, out=tmp_path, resume=True)


@pytest.mark.slow
def test_starting_over_is_asked_for_once_and_loses_nothing(tmp_path):
    first = fedskew.simulate(TASK, out=tmp_path)
    with pytest.raises(ConfigError, match="fresh: starts over, and resume goes on"):
        fedskew.simulate(TASK, out=tmp_path, resume=True, fresh=True)
    with pytest.raises(ConfigError, match="fresh: give the folder"):
        fedskew.simulate(TASK, fresh=True)
    again = fedskew.simulate(TASK, out=tmp_path, fresh=True)
    assert (again.folder / "model.safetensors").read_bytes() == (
        tmp_path / "earlier" / f"{first.folder.name}.1" / "model.safetensors"
    ).read_bytes()
    fedskew.simulate(TASK, out=tmp_path, fresh=True)
    assert (tmp_path / "earlier" / f"{first.folder.name}.2").is_dir()


def test_starting_over_moves_nothing_before_the_config_is_known_to_run(tmp_path):
    tables = {**TASK, "data": {"name": "csv", "root": str(table(tmp_path / "own.csv"))}}
    folder = fedskew.simulate(tables, out=tmp_path / "runs").folder
    (tmp_path / "own.csv").unlink()
    with pytest.raises(DataError, match="own.csv"):
        fedskew.simulate(tables, out=tmp_path / "runs", fresh=True)
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert (folder / "model.safetensors").exists()


def test_two_processes_never_write_one_run_or_one_sweep(tmp_path):
    result = fedskew.simulate(TASK, out=tmp_path)
    before = (result.folder / "rounds.jsonl").read_bytes()
    for how in ({"resume": True}, {"fresh": True}, {}):
        with locked(result.folder), pytest.raises(RunError, match="another run is writing here"):
            fedskew.simulate(TASK, out=tmp_path, **how)
    assert (result.folder / "rounds.jsonl").read_bytes() == before
    file = tmp_path / "swept.toml"
    file.write_text(SWEEP.format(root=table(tmp_path / "own.csv"), more=""), encoding="utf-8")
    sweep = Sweep.read(file)
    with locked(sweep.folder(tmp_path)), pytest.raises(RunError, match="sweep-swept-.*: another run is writing here"):
        run_sweep(sweep, tmp_path)
    run = fedskew.simulate(sweep.cells[0].config.for_seed(0), out=tmp_path).folder
    table(tmp_path / "own.csv", shift=1.0)
    with locked(sweep.folder(tmp_path)), pytest.raises(RunError, match="another run is writing here"):
        run_sweep(sweep, tmp_path, fresh=True)
    assert (run / "summary.json").exists()  # what is refused moves nothing


@pytest.mark.slow
def test_a_run_folder_replays_from_any_directory(tmp_path, monkeypatch, own):
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    table(home / "own.csv")
    table(home / "test.csv", rows=40)
    (home / "weights_d.py").write_text(WEIGHTING.format(helper="helper_d"))
    (home / "helper_d.py").write_text(HELPER)
    tree = {**TASK, "data": {"name": "csv", "root": "own.csv", "test": "test.csv"}, "seeds": [0, 1]}
    tree["partition"] = {"rule": "quantity", "clients": 4, "labels_per_client": 2}
    with monkeypatch.context() as there:
        there.chdir(home)
        there.syspath_prepend(str(home))
        result = fedskew.simulate(tree, method={"weighting": "weights_d:Own"}, out="runs")
    for name in ("weights_d", "helper_d"):
        del sys.modules[name]
    monkeypatch.chdir(other)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = home / result.folder
    runs = RunFolder.read_runs(folder)  # not importable here, and not needed
    assert [run.seed for run in runs] == [0, 1]
    replay = fedskew.simulate(read(folder / "config.toml", trust_code=True), out="again")
    assert (replay.folder / "seed-1" / "model.safetensors").read_bytes() == (
        folder / "seed-1" / "model.safetensors"
    ).read_bytes()


def test_an_infinite_parameter_survives_config_folder_and_replay(tmp_path):
    tree = {**TASK, "method": {"preset": "fedpals"}, "target": {"mix": "uniform"}}
    tree["method"] |= {"weighting": {"name": "fedpals", "strength": math.inf}}
    result = fedskew.simulate(tree, out=tmp_path)
    stored = read(result.folder / "config.toml")
    assert stored.method["weighting"]["strength"] == math.inf
    assert stored.hash == result.config.hash
    plain = fedskew.simulate({**tree, "method": "fedavg"})  # infinite strength is FedAvg
    for record, other in zip(result.rounds, plain.rounds, strict=True):
        assert record["weights"] == pytest.approx(other["weights"])
    with pytest.raises(ConfigError, match="training.lr"):
        fedskew.simulate({**TASK, "training": {**TASK["training"], "lr": math.inf}})
