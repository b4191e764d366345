"""Looking at an app, or at a federation's folder from elsewhere, runs nothing of it; agreeing does, and says so."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from fedskew.cli import app
from fedskew.deploy import Address, Agreement, Terms, agree, other_code, write_federation
from fedskew.deploy.app_files import app_hash, read_app
from fedskew.errors import ConfigError, RunError
from fedskew.experiment import resolve

AGREED = {"sites": ["north", "south"], "classes": ["no", "yes"], "shape": [1, 4, 4]}
CONFIG = {
    "name": "clinics",
    "data": {"name": "folder"},
    "partition": {"rule": "natural"},
    "model": {"name": "logistic"},
    "method": {"preset": "fedavg"},
    "training": {"rounds": 3},
}
TRACE = "trace.txt"
NETWORK = """\
from pathlib import Path
from torch import nn

Path({trace!r}).write_text("ran")

class Net(nn.Module):
    def __init__(self, num_classes, in_shape):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))

    def forward(self, x):
        return self.layers(x)

def read(**options):
    raise AssertionError
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that breaks no line."""
    monkeypatch.setenv("COLUMNS", "400")


def federation(tmp_path: Path) -> Path:
    """The folder of a site that was sent another app: `strange.py` in it writes a file when it is run."""
    config = resolve(CONFIG)
    table = {"name": "npz", "root": "own.npz"}
    write_federation(tmp_path / "fed", config, Agreement.resolve(AGREED), Address("localhost", 9092), table)
    site = tmp_path / "fed" / "sites" / "north"
    np.savez(site / "own.npz", x=np.zeros((20, 4, 4)), y=np.array(["no", "yes"] * 10))
    (tmp_path / "fed" / "app" / "strange.py").write_text(NETWORK.format(trace=str(tmp_path / TRACE)))
    (site / "app").rename(site / "offered")
    (site / "offered" / "strange.py").write_text(NETWORK.format(trace=str(tmp_path / TRACE)))
    return site


def name(folder: Path, section: str, key: str, value: object) -> None:
    """Set a dotted key of an app's `run.toml`."""
    tree = tomllib.loads((folder / "run.toml").read_text())
    table = tree
    for part in filter(None, section.split(".")):
        table = table.setdefault(part, {})
    table[key] = value
    (folder / "run.toml").write_text(tomli_w.dumps(tree))


def check(site: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    app(["deploy", "site", "--check", str(site / "data.toml"), *more], standalone_mode=False)
    return " ".join(re.sub(r"[^\w\s.,:;=%()[\]/'-]", " ", capsys.readouterr().out).split())


PLACES: list[tuple[str, str, object]] = [
    ("model", "name", "strange:Net"),
    ("data", "name", "strange:Net"),
    ("partition", "rule", "strange:Net"),
    ("training", "augmentation", "strange:Net"),
    ("method.selection", "name", "strange:Net"),
    ("method.weighting", "name", "strange:Net"),
    ("method.aggregation", "name", "strange:Net"),
    ("method.server_update", "name", "strange:Net"),
    ("method.local_step", "name", "strange:Net"),
    ("method.objective", "name", "strange:Net"),
    ("method.objective", "terms", [{"name": "strange:Net", "weight": 1.0}]),
    ("method.finish", "name", "strange:Net"),
    ("method", "selection", {"name": "function", "function": "strange:Net"}),
    ("tune", "values", ["strange:Net"]),
]


@pytest.mark.parametrize(("section", "key", "value"), PLACES, ids=[f"{section}.{key}" for section, key, _ in PLACES])
def test_looking_imports_nothing_wherever_a_name_stands(tmp_path, capsys, section, key, value):
    site = federation(tmp_path)
    name(site / "offered", section, key, value)
    if section == "tune":
        name(site / "offered", "tune", "key", "model.name")
    said = check(site, capsys)
    assert not (tmp_path / TRACE).exists()
    assert "strange" not in sys.modules
    assert re.search(
        rf"CODE THAT IS NOT AS FEDSKEW WRITES IT.* strange\.py, run\.toml: {section}\S* = strange:Net", said
    )
    assert "unknown until agreed to" in said
    assert "most rounds 3" in said


def test_an_app_that_another_takes_the_place_of_while_it_is_looked_at_is_not_agreed_to(tmp_path, monkeypatch):
    site = federation(tmp_path)
    load = np.load

    def meanwhile(*arguments, **options):
        name(site / "offered", "training", "rounds", 50)
        return load(*arguments, **options)

    monkeypatch.setattr(np, "load", meanwhile)
    with pytest.raises(RunError, match="has changed while it was looked at"):
        agree(site / "data.toml", site / "offered")
    assert not (site / "agreed.toml").exists()


@pytest.mark.parametrize(
    "given", ["os:system", "subprocess:getoutput", "builtins:eval", "torch.hub:load", "offered.strange:Net", "cwd:Net"]
)
def test_looking_calls_nothing(tmp_path, capsys, monkeypatch, given):
    site = federation(tmp_path)
    (site / "cwd.py").write_text(NETWORK.format(trace=str(tmp_path / TRACE)))
    name(site / "offered", "model", "name", given)
    for option in ("command", "cmd"):
        name(site / "offered", "model", option, f"touch {tmp_path / TRACE}")
    monkeypatch.chdir(site)
    monkeypatch.syspath_prepend("")
    assert f"model.name = {given}" in check(site, capsys)
    assert not (tmp_path / TRACE).exists()


def test_looking_opens_no_file_that_the_app_names(tmp_path, capsys):
    site = federation(tmp_path)
    name(site / "offered", "model", "name", "resnet18")
    name(site / "offered", "model", "weights", str(tmp_path / "not-there.safetensors"))
    assert f"model.weights = {tmp_path / 'not-there.safetensors'}" in check(site, capsys)


def test_agreeing_runs_the_app_s_own_code_and_says_what_it_makes(tmp_path, capsys):
    site = federation(tmp_path)
    name(site / "offered", "model", "name", "strange:Net")
    files = read_app(site / "offered")
    (site / "strange.py").write_text("raise RuntimeError('of the current folder')")
    said = check(site, capsys, "--agree")
    assert (tmp_path / TRACE).exists()
    agreed = Terms.read(site / "agreed.toml")
    assert agreed.app == app_hash(files)
    assert "unknown until agreed to" in said
    assert "the model after local training" in said.rpartition("What will leave this site")[2]
    assert "strange" not in sys.modules
    (tmp_path / TRACE).unlink()
    said = check(site, capsys)  # the same app once more: again nothing is run
    assert f"agreed to this at {agreed.agreed}" in said
    assert not (tmp_path / TRACE).exists()


def test_only_files_with_the_hash_are_run(tmp_path, capsys):
    site = federation(tmp_path)
    name(site / "offered", "model", "name", "strange:Net")
    hidden = site / "offered" / "__pycache__"
    hidden.mkdir()
    (hidden / "shadow.py").write_text(NETWORK.format(trace=str(tmp_path / "hidden.txt")))
    (site / "offered" / "strange.py").write_text(
        "import __pycache__.shadow\n" + NETWORK.format(trace=str(tmp_path / TRACE))
    )
    with pytest.raises(ConfigError, match="strange:Net' can't be imported: No module named '__pycache__"):
        check(site, capsys, "--agree")
    assert not (tmp_path / "hidden.txt").exists()
    assert not (site / "agreed.toml").exists()


@pytest.mark.parametrize("given", ["os:system", "subprocess:getoutput", "torch.hub:load"])
def test_agreeing_makes_no_function_of_python_or_of_a_package_a_network(tmp_path, capsys, given):
    site = federation(tmp_path)
    name(site / "offered", "model", "name", given)
    with pytest.raises(ConfigError, match="standard library|what your own files define"):
        check(site, capsys, "--agree")
    assert not (site / "agreed.toml").exists()


def test_a_project_file_that_fedskew_did_not_write_is_code(tmp_path):
    site = federation(tmp_path)
    (site / "offered" / "strange.py").unlink()
    assert other_code(read_app(site / "offered")) == []
    project = site / "offered" / "pyproject.toml"
    project.write_text(project.read_text().replace("federation.site:site", "antigravity:app"))
    assert other_code(read_app(site / "offered")) == ["pyproject.toml"]


def test_a_federation_s_folder_is_checked_without_its_code(tmp_path, capsys):
    folder = federation(tmp_path).parents[1]
    name(folder / "app", "model", "name", "strange:Net")
    with pytest.raises(ConfigError, match=r"run\.toml: model\.name: 'strange:Net' is the app's own.*--trust-code"):
        app(["deploy", "check", str(folder)], standalone_mode=False)
    assert not (tmp_path / TRACE).exists()
    assert "CODE THAT IS NOT AS FEDSKEW WRITES IT, and would run at the sites: strange.py" in capsys.readouterr().out
    app(["deploy", "check", str(folder), "--trust-code"], standalone_mode=False)
    assert "can be played, by 2 sites" in capsys.readouterr().out


@pytest.mark.slow
def test_files_in_the_current_folder_are_not_imported_in_place_of_packages(tmp_path):
    site = federation(tmp_path)
    for package in ("flwr", "scipy", "safetensors"):
        (site / "offered" / f"{package}.py").write_text(NETWORK.format(trace=str(tmp_path / TRACE)))
    words = [str(Path(sys.executable).with_name("fedskew")), "deploy", "site", "--check", "../data.toml"]
    done = subprocess.run(words, cwd=site / "offered", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / TRACE).exists()
