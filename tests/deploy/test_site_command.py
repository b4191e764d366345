"""`fedskew deploy site --check`: what a site holds and what will leave it; nothing of an app is run to look at it."""

import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from common import save_image
from fedskew.cli import app
from fedskew.deploy import Address, Agreement, Book, Terms, agree, other_code, write_federation
from fedskew.deploy.app_files import app_hash, read_app
from fedskew.deploy.terms import CountsRequest
from fedskew.errors import ConfigError, FedskewError, RunError
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


# `fedskew deploy site --check`: what a site holds and what will leave it, or one line of what does not fit.


HELD = {"shoe": 6, "hat": 2, "glove": 0}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that breaks no line."""
    monkeypatch.setenv("COLUMNS", "400")


def paint(folder: Path, held: dict[str, int], size: int = 8, mode: str = "RGB") -> None:
    """Images in class folders."""
    rng = np.random.default_rng(0)
    for name, count in held.items():
        for row in range(count):
            save_image(folder / name / f"{row}.png", rng.integers(0, 256, (size, size, 3), dtype=np.uint8), mode)


def site(tmp_path: Path, method: str = "fedavg", **agreed: object) -> Path:
    """A site's folder in a federation of three classes, with its images."""
    terms = Agreement.resolve(
        {"sites": ["north", "south"], "classes": ["glove", "hat", "shoe"], "shape": [3, 8, 8], **agreed}
    )
    config = resolve({**CONFIG, "method": {"preset": method}})
    write_federation(tmp_path / "fed", config, terms, Address("localhost", 9092), {"name": "folder", "root": "images"})
    folder = tmp_path / "fed" / "sites" / "north"
    paint(folder / "images" / "train", HELD)
    paint(folder / "images" / "test", {"shoe": 1, "hat": 1})
    return folder


def check(folder: Path, capsys: pytest.CaptureFixture[str], *more: object) -> str:
    """What the command prints, on one line."""
    app(["deploy", "site", "--check", str(folder / "data.toml"), *map(str, more)], standalone_mode=False)
    return " ".join(re.sub(r"[^\w\s.,:;=%()[\]/'-]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize(
    ("agreed", "method", "says", "never"),
    [
        ({}, "fedavg", ["8 samples to train on, 2 to test; 3 x 8 x 8", "glove 0 none 0 hat 2 1 shoe 6 1"], []),
        ({}, "fedavg", ["number of its training samples of each of 3 classes", "confusion matrix"], []),
        ({}, "fedavg", [f"{(3 * 8 * 8 + 1) * 3 * 4:,}", "never samples"], []),  # a logistic regression in float32
        ({"label_counts": "noisy", "epsilon": 0.5}, "fedavg", ["epsilon 0.5"], ["exact label counts"]),
        ({"label_counts": "withheld"}, "fedavg", [], ["label counts"]),
        ({}, "scaffold", ["scaffold"], []),
    ],
)
def test_it_says_what_the_site_holds_and_what_will_leave(tmp_path, capsys, agreed, method, says, never):
    said = check(site(tmp_path, method=method, **agreed), capsys)
    assert all(words in said for words in says)
    assert all(words in said.partition("never")[2] for words in never)
    assert ("confusion" in said) is ("label_counts" not in agreed)
    assert ("of each of 3 classes" in said) is (agreed.get("label_counts") != "withheld")
    assert "plausible" not in said


def test_more_test_samples_than_the_server_takes_for_plausible_are_said_before_a_site_joins(tmp_path, capsys):
    paint((folder := site(tmp_path)) / "images" / "test", {"shoe": 81})  # 8 samples to train on, 82 to test
    said = check(folder, capsys)
    assert "The server will refuse this site's evaluations: of its 82 test samples 80 are plausible" in said


@pytest.mark.parametrize("state", ["data.toml", "data.toml/below/state", "/proc/state", "link", "link/state"])
def test_a_state_folder_that_cannot_be_written_is_said_before_a_site_joins(tmp_path, capsys, state):
    folder = site(tmp_path)
    (folder / "link").symlink_to(tmp_path / "not-mounted")
    data = folder / "data.toml"
    data.write_text(data.read_text().replace('"state"', f'"{state}"'))
    with pytest.raises(RunError, match=rf"{folder / state}: can't be written: \w+"):
        check(folder, capsys)


def test_the_agreement_may_be_elsewhere(tmp_path, capsys):
    folder = site(tmp_path)
    shutil.rmtree(folder / "app")
    assert "8 samples" in check(folder, capsys, "--agreement", tmp_path / "fed" / "app")


@pytest.mark.slow
def test_agreeing_writes_what_was_shown(tmp_path, capsys):
    folder = site(tmp_path)
    said = check(folder, capsys)
    assert "nothing is written" in said
    assert not (folder / "agreed.toml").exists()
    said = check(folder, capsys, "--agree")
    agreed = Terms.read(folder / "agreed.toml")
    assert agreed.rounds == 3
    assert agreed.app == app_hash(read_app(tmp_path / "fed" / "app"))
    assert stat.S_IMODE((folder / "agreed.toml").stat().st_mode) == 0o600
    assert "most rounds 3" in said
    assert "the site refuses whatever goes beyond it" in said
    assert f"agreed to this at {agreed.agreed}" in check(folder, capsys)
    assert "CODE THAT IS NOT" not in said


def test_a_terminal_is_asked(tmp_path, capsys, monkeypatch):
    folder = site(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda text: next(answers))
    assert "nothing is written" in check(folder, capsys)
    assert not (folder / "agreed.toml").exists()
    assert "agreed;" in check(folder, capsys)
    assert (folder / "agreed.toml").exists()


def test_another_app_of_the_server_is_shown_in_place_of_the_copy(tmp_path, capsys):
    folder = site(tmp_path)
    check(folder, capsys, "--agree")
    shutil.copytree(folder / "app", folder / "offered")
    run = folder / "offered" / "run.toml"
    run.write_text(run.read_text().replace("rounds = 3", "rounds = 300"))
    (folder / "offered" / "federation" / "site.py").write_text("import os")
    said = check(folder, capsys)
    assert "most rounds 300 3" in said
    assert "run.toml: training.rounds: 3 - 300" in said
    assert "federation/site.py: is another" in said
    assert "CODE THAT IS NOT AS FEDSKEW WRITES IT, and would run at this site: federation/site.py" in said
    assert Terms.read(folder / "agreed.toml").rounds == 3
    check(folder, capsys, "--agree")
    assert Terms.read(folder / "agreed.toml").rounds == 300
    assert not (folder / "offered").exists()
    assert tomllib.loads((folder / "app" / "run.toml").read_text())["training"]["rounds"] == 300


def test_a_release_that_is_too_noisy_for_this_server_is_said(tmp_path, capsys):
    pytest.importorskip("opendp")
    folder = site(tmp_path, label_counts="noisy", epsilon=0.5)
    asked = CountsRequest("noisy", ("glove", "hat", "shoe"), 0.04)
    Book(folder / "state").release(asked, np.array([0.0, 2.0, 6.0]), asked.once)
    said = check(folder, capsys)
    assert "largest sum of epsilons (add-remove) 0.54" in said
    assert "The last one is over 10 times noisier than this server asks for: if you agree, the counts are" in said


@pytest.mark.slow
def test_agreeing_again_counts_rounds_anew_and_epsilons_never(tmp_path, capsys):
    pytest.importorskip("opendp")
    folder = site(tmp_path, label_counts="noisy", epsilon=0.5)
    before = set(folder.rglob("*"))
    check(folder, capsys)
    assert set(folder.rglob("*")) == before, "looking changes nothing"
    said = check(folder, capsys, "--agree")
    assert "largest sum of epsilons (add-remove) 0.5" in said
    first = Terms.read(folder / "agreed.toml")
    book = Book(folder / "state")
    asked = CountsRequest("noisy", ("glove", "hat", "shoe"), 0.5)
    book.release(asked, np.array([0.0, 2.0, 6.0]), first.budget)
    book.count(first, "train", "a question", first.rounds)
    assert "trained in 1 round." in check(folder, capsys, "--agree")
    second = Terms.read(folder / "agreed.toml")
    assert (second.epsilon_total, second.data) == (0.5, first.data)
    assert book.rounds(second) == 0
    paint(folder / "images" / "train", {"hat": 5})
    said = check(folder, capsys, "--agree")
    assert "The data have changed" in said
    third = Terms.read(folder / "agreed.toml")
    assert third.epsilon_total == 1.0
    assert third.data != second.data
    (folder / "agreed.toml").unlink()  # what was spent is in the book, not here
    check(folder, capsys, "--agree")
    assert Terms.read(folder / "agreed.toml").epsilon_total == 1.0


def described(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "data.toml").write_text(text)


def painted(**how: Any) -> Callable[[Path], object]:
    return lambda folder: [paint(folder / "images" / part, HELD, **how) for part in ("train", "test")]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda site: paint(site / "images" / "train", {"glvoe": 2}), ["'glvoe'", "did you mean 'glove'"]),
        (painted(size=9), ["(3, 9, 9)", "(3, 8, 8)"]),
        (painted(mode="L"), ["(1, 8, 8)", "(3, 8, 8)"]),
        (lambda site: (site / "images").rename(site / "elsewhere"), ["images does not exist"]),
        (lambda site: (site / "images" / "train" / "hat" / "0.png").write_text("not an image"), ["0.png", "image"]),
        (lambda site: (site / "app" / "deploy.toml").unlink(), ["deploy.toml"]),
        (lambda site: shutil.rmtree(site / "app"), ["app: there is no such folder"]),
        (lambda site: (site / "data.toml").unlink(), ["data.toml: there is no such file"]),
        (lambda site: (site / "data.toml").rename(site / "else") and (site / "data.toml").mkdir(), ["is a folder"]),
        (described('state = "state"'), ["[data]"]),
        (described('stat = "x"\ndata = {name = "folder", root = "images"}'), ["stat", "did you mean 'state'"]),
        (described('data = {name = "foldre", root = "images"}'), ["foldre", "folder"]),
        (described("[data"), ["data.toml"]),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, capsys, mistake, says):
    folder = site(tmp_path)
    mistake(folder)
    with pytest.raises(FedskewError) as error:
        check(folder, capsys)
    assert all(word in str(error.value) for word in says), error.value
    assert "\n" not in str(error.value)
