"""A run folder from somebody else: what it names is imported from one's own files, or once its code is trusted."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fedskew
from common import task
from fedskew.cli import app
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import RunFolder, read, resolve

NETWORK = """\
from pathlib import Path
from os import system
from torch import nn
from torch.hub import load

Path({trace!r}).write_text("ran")

class Net(nn.Module):
    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))

def make(num_classes, in_shape):
    return Net(num_classes, in_shape)
"""
TASK = task(4, rounds=1, participation=0.5) | {"model": {"name": "net_s:Net"}}


@pytest.fixture
def trace(tmp_path) -> Path:
    return tmp_path / "trace.txt"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run folder that brings the code of its network."""
    home = tmp_path_factory.mktemp("home")
    (home / "net_s.py").write_text(NETWORK.format(trace="trace.txt"))
    with pytest.MonkeyPatch.context() as there:
        there.chdir(home)
        there.syspath_prepend(str(home))
        folder = fedskew.simulate(TASK, out=home).folder
    del sys.modules["net_s"]
    (home / "net_s.py").unlink()
    return folder


@pytest.fixture
def strange(made, tmp_path, monkeypatch) -> Path:
    """A copy of it, where its network is importable from nowhere else."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 1, 8, 8), np.float32))
    return Path(shutil.copytree(made, tmp_path / "theirs" / made.name))


def naming(network: str, run: Path) -> None:
    """Name another network in a run's config."""
    config = run / "config.toml"
    config.write_text(config.read_text().replace("net_s:Net", network))


ASKS = (
    r"config\.toml, line \d+: model\.name: asks for code that came with the run: "
    r"'net_s:Net' in .*code/net_s\.py.*--trust-code"
)


@pytest.mark.slow
def test_its_code_is_not_imported_and_the_message_says_which_file_asks_for_what(strange, trace, tmp_path):
    with pytest.raises(ConfigError, match=ASKS):
        fedskew.load(strange)
    with pytest.raises(ConfigError, match=ASKS):
        fedskew.simulate(strange / "config.toml", out=tmp_path / "again")
    for words in (
        ["predict", str(strange), str(tmp_path / "new.npz")],
        ["adapt", str(strange), "--target-data", str(tmp_path / "new.npz")],
        ["run", str(strange / "config.toml"), "--resume"],
    ):
        with pytest.raises(ConfigError, match=ASKS):
            app(words, standalone_mode=False)
    assert [run.seed for run in RunFolder.read_runs(strange)] == [0]  # a report needs none of it
    assert not trace.exists()


def test_trusted_code_is_imported_for_its_own_run_alone(strange, trace, tmp_path, capsys):
    assert fedskew.load(strange, trust_code=True).predict(np.zeros((2, 1, 8, 8), np.float32)).shape == (2, 10)
    assert trace.exists()
    app(["predict", str(strange), str(tmp_path / "new.npz"), "--trust-code"], standalone_mode=False)
    app(["run", str(strange / "config.toml"), "--resume", "--trust-code"], standalone_mode=False)
    with pytest.raises(ConfigError, match=ASKS):  # which trust in another run is no trust in
        fedskew.load(shutil.copytree(strange, tmp_path / "other"))


def test_one_s_own_file_needs_no_trust(strange, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    shutil.copy(strange / "code" / "net_s.py", tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    assert fedskew.load(strange).predict(np.zeros((1, 1, 8, 8), np.float32)).shape == (1, 10)
    assert read(strange / "config.toml").model.name == "net_s:Net"


@pytest.mark.parametrize("package", ["extra", "net_s"])
def test_being_in_its_folder_makes_nothing_one_s_own(strange, trace, monkeypatch, package):
    shutil.move(strange / "code", strange / "extra")
    if package == "net_s":
        shutil.move(strange / "extra" / "net_s.py", strange)
    else:
        naming("extra.net_s:Net", strange)
    monkeypatch.chdir(strange)
    monkeypatch.syspath_prepend("")
    with pytest.raises(ConfigError, match="asks for code that came with the run"):
        fedskew.load(".")
    assert not trace.exists()


def test_a_notebook_s_own_class_needs_no_trust_and_elsewhere_a_file(strange, trace, monkeypatch):
    naming("__main__:Net", strange)
    (strange / "code" / "net_s.py").rename(strange / "code" / "__main__.py")
    monkeypatch.setitem(sys.modules, "__main__", notebook := ModuleType("__main__"))  # which has no file
    for trust in (False, True):
        with pytest.raises(ConfigError, match="put it into a file of your own and name that here, as own:Net"):
            fedskew.load(strange, trust_code=trust)
    exec(NETWORK.format(trace=str(trace)), vars(notebook))
    assert fedskew.load(strange).predict(np.zeros((1, 1, 8, 8), np.float32)).shape == (1, 10)


def test_its_own_files_named_after_python_s_are_not_python_s(strange, monkeypatch):
    naming("antigravity:Net", strange)
    (strange / "code" / "antigravity.py").write_text("raise RuntimeError")
    with pytest.raises(ConfigError, match="standard library"):
        fedskew.load(strange, trust_code=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("os:system", "standard library"),
        ("subprocess:getoutput", "standard library"),
        ("os.path:join", "standard library"),
        ("builtins:eval", "standard library"),
        ("posix:system", "standard library"),
        ("torch.hub:load", "is defined in torch.hub"),
        ("torch.utils.__main__:x", "No module named"),
        ("fedskew.files:write_text", "is defined in fedskew.files"),
        ("fedskew.cli.run:Path", "is defined in pathlib"),
        ("fedskew.cli.run:typer", "is defined in builtins"),
        ("fedskew.__main__:main", "No module named"),
        ("net_s:system", "is defined in posix"),
        ("net_s:load", "is defined in torch.hub"),
        ("net_s:Path", "is defined in pathlib"),
        ("net_s:Net.forward", "names nothing"),
        ("net_s :Net", "names nothing"),
        (".net_s:Net", "names nothing"),
        ("net_s.:Net", "names nothing"),
    ],
)
def test_what_no_config_may_name(tmp_path, monkeypatch, name, reason):
    (tmp_path / "net_s.py").write_text(NETWORK.format(trace=str(tmp_path / "trace.txt")))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^model\.name: .*{reason}"):
        resolve(TASK | {"model": {"name": name}})


@pytest.mark.parametrize("name", ["net_s:Net", "net_s:make", "torch.nn:Identity", "torch.nn.modules.linear:Identity"])
def test_what_a_config_may_name(tmp_path, monkeypatch, name):
    (tmp_path / "net_s.py").write_text(NETWORK.format(trace=str(tmp_path / "trace.txt")))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve(TASK | {"model": {"name": name}}).model.name == name


def test_a_package_is_not_imported_to_find_out_whose_it_is(tmp_path, monkeypatch):
    package = tmp_path / "pack_s"
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="No module named 'pack_s.inner'"):
        resolve(TASK | {"model": {"name": "pack_s.inner:Net"}})
    assert not (tmp_path / "ran").exists()


def test_a_finished_run_without_its_records_is_said_to_lack_them(strange):
    (strange / "rounds.jsonl").rename(strange / "away.jsonl")
    naming("mlp3", strange)
    again = "start over with --fresh, which keeps the old folder$"
    for read_it in (RunFolder.read_runs, fedskew.load):
        with pytest.raises(RunError, match=rf"rounds\.jsonl: is missing; put the file back, or {again}"):
            read_it(strange)
    for summary in ("null", "[1]"):
        (strange / "summary.json").write_text(summary)
        with pytest.raises(RunError, match=rf"summary\.json: can't be read \(it holds .*\); put it back, or {again}"):
            RunFolder.read_runs(strange)


@pytest.mark.parametrize("parts", [[], ["."], [".."], ["../theirs"], ["/etc"]])
def test_its_summary_leads_to_no_other_folder(strange, parts):
    (strange / "rounds.jsonl").rename(strange / "away.jsonl")
    summary = json.loads((strange / "summary.json").read_text())
    (strange / "summary.json").write_text(json.dumps(summary | {"parts": parts}))
    naming("mlp3", strange)
    with pytest.raises(RunError, match="which is no folder of this run"):
        fedskew.load(strange)


def test_its_identity_names_no_file_outside(strange, tmp_path):
    (tmp_path / "secret.py").write_text("x = 1")
    said = json.loads((strange / "identity.json").read_text())
    (strange / "identity.json").write_text(json.dumps(said | {"code": [str(tmp_path / "secret.py")]}))
    with pytest.raises(RunError, match=r"identity\.json: damaged .*outside code/"):
        fedskew.simulate(read(strange / "config.toml", trust_code=True), out=strange.parent, resume=True)
