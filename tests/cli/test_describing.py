"""`fedskew report` tells runs of one name apart: by what differs in their configs, or as it is told."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedskew
from common import save_image, task
from fedskew.labels import LabelCounts


def labels_of(page: Path) -> list[str]:
    """The runs of a page, as its script lists them."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r'"label":"([^"]*)"', text[text.index('id="figures"') :])


@pytest.fixture
def two(tmp_path, digits, command):
    """Two learning rates under one name, of which one has two seeds."""
    command("run", "my.toml", "--set", "training.lr=0.1")
    command("run", "my.toml", "--set", "training.lr=0.5", "--seeds", "0,1")
    return tmp_path


def test_labels_come_from_what_differs(two, command):
    command("report", *sorted(two.glob("runs/my-*")))
    assert sorted(labels_of(two / "report.html")) == ["my, lr=0.1", "my, lr=0.5"]
    command("report", "runs", "--out", "all.html")
    assert sorted(labels_of(two / "all.html")) == ["my, lr=0.1", "my, lr=0.5"]


def test_labels_are_taken_as_given(two, command):
    one, other = sorted(map(str, two.glob("runs/my-*")))
    command("report", f"a=b={one}", f"large={other}", status=2)
    command("report", f"small={one}", f"large={other}")
    assert labels_of(two / "report.html") == ["small", "large"]
    command("report", one, other, "--label", "x=1", "--label", "y")
    assert labels_of(two / "report.html") == ["x=1", "y"]
    assert "report.pdf: the page is to be" in command("report", one, "--out", "report.pdf", status=2).stderr
    few = command("report", one, other, "--label", "x", status=2)
    assert few.stderr == "fedskew: --label: 1 given for 2 runs; give one for each\n"
    twice = command("report", one, one, status=2)
    assert "has seed 0 twice; give each configuration its own label (LABEL=RUN)" in twice.stderr


def test_methods_and_values_in_one_folder_are_compared(tmp_path, digits, command):
    for rate in ("0.1", "0.5"):
        words = ["--method", "fedavg", "--method", "fedla", "--set", f"training.lr={rate}", "--out", "all"]
        command("run", "my.toml", *words)
    command("report", "all")
    methods = [f"my-{method}, lr={rate}" for method in ("fedavg", "fedla") for rate in ("0.1", "0.5")]
    assert sorted(labels_of(tmp_path / "report.html")) == methods


# What a run's labels don't allow is said when it begins.

CONFIG = """
seeds = [0, 1]
data.name = "digits"
partition = {rule = "sparsity", clients = 4, labels_per_client = 2}
model.name = "logistic"
method.preset = "fedlc"
training = {rounds = 1, batch_size = 64}
"""


def test_a_run_begins_with_a_note_for_each_seed_that_has_one(tmp_path, command):
    (tmp_path / "my.toml").write_text(CONFIG, encoding="utf-8")
    done = command("run", "my.toml")
    assert "note on run, seed 0: fedlc tells two classes apart only where some client holds both. Here " in done.stdout
    assert "No client holds class" in done.stdout
    plain = command("run", "my.toml", "--method", "fedavg", "--set", "partition.covered=true")
    assert "note on" not in plain.stdout


def test_a_method_is_listed_with_what_it_relies_on(tmp_path, command):
    assert "Tells two classes apart only where some client holds both" in command("methods", "fedlc").stdout
    assert "Tells two classes apart" not in command("methods", "fedrs").stdout


ROWS = """
data = {{name = "npz", root = "own.npz", validation = 0}}
partition.rule = "natural"
model.name = "logistic"
training = {{rounds = 1, batch_size = 8}}
{more}
"""


def rows(folder: Path, labels: list[int], test_labels: list[int]) -> None:
    rng = np.random.default_rng(0)
    x, test_x = (rng.normal(size=(len(part), 4)).astype(np.float32) for part in (labels, test_labels))
    clients = np.array([f"site-{at % 2}" for at in range(len(labels))])
    np.savez(folder / "own.npz", x=x, y=labels, client=clients, x_test=test_x, y_test=test_labels)


def test_a_class_that_only_the_test_part_has_is_said(tmp_path, command):
    rows(tmp_path, [0, 0, 1, 1] * 5, [0, 1, 2, 2])
    (tmp_path / "my.toml").write_text(ROWS.format(more=""), encoding="utf-8")
    assert "No client holds class 2, 50% of the test part" in command("run", "my.toml").stdout


def test_clients_with_one_class_only_are_told_so(tmp_path, command):
    rows(tmp_path, [0] * 20, [0, 0, 0, 0])
    (tmp_path / "my.toml").write_text(ROWS.format(more=""), encoding="utf-8")
    done = command("run", "my.toml")
    assert "All samples of the clients are of class 0: there is nothing to tell apart" in done.stdout


def test_target_shares_that_do_not_add_up_are_refused(tmp_path, command):
    rows(tmp_path, [0, 0, 1, 1] * 5, [0, 1])
    (tmp_path / "my.toml").write_text(ROWS.format(more="target.mix = [0.4, 0.4]"), encoding="utf-8")
    done = command("run", "my.toml", status=2)
    assert "target.mix: the shares sum to 0.8; give shares that sum to 1" in done.stderr


# `fedskew counts` counts labels in any data, and `describe` reads whatever `counts` takes.

EXPECTED = "client,cold,flu\nnorth,1,2\nsouth,0,1\n"
SAMPLES = [("north", "flu"), ("north", "flu"), ("north", "cold"), ("south", "flu")]


def folder_of_images(here: Path) -> Path:
    for row, (client, label) in enumerate(SAMPLES):
        save_image(here / "images" / client / label / f"{row}.png", Image.new("L", (2, 2)))
    (here / "images" / "south" / "cold").mkdir()
    return here / "images"


def folder_with_parts(here: Path) -> Path:
    folder_of_images(here / "parts").rename(here / "parts" / "train")
    (here / "parts" / "test" / "south" / "cold").mkdir(parents=True)
    return here / "parts"


def arrays(here: Path) -> Path:
    clients, labels = zip(*SAMPLES, strict=True)
    np.savez(here / "a.npz", x=np.zeros((4, 2)), y=np.array(labels), client=np.array(clients))
    return here / "a.npz"


def list_of_samples(here: Path) -> Path:
    rows = [f"{row};{client};{label}" for row, (client, label) in enumerate(SAMPLES)]
    (here / "samples.csv").write_text("\n".join(["id;hospital;diagnosis", *rows]))
    return here / "samples.csv"


def hugging_face(here: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    clients, labels = zip(*SAMPLES, strict=True)
    table = datasets.Dataset.from_dict({"label": [int(label == "flu") for label in labels], "client": clients})
    table = table.cast_column("label", datasets.ClassLabel(names=["cold", "flu"]))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(here / "saved")
    return here / "saved"


def table_of_counts(here: Path) -> Path:
    (here / "counts.csv").write_text("hospital\tcold\tflu\ttotal\nnorth\t1\t2\t3\nsouth\t0\t1\t1\n")
    return here / "counts.csv"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [folder_of_images, folder_with_parts, arrays, list_of_samples, hugging_face, table_of_counts]
)
def test_counts_are_the_same_from_every_source_and_describe_reads_it_too(tmp_path, command, make):
    source = make(tmp_path)
    counted = command("counts", source)
    assert counted.stdout == EXPECTED
    assert counted.returncode == 0
    (tmp_path / "clean.csv").write_text(counted.stdout)
    described = [command("describe", path, "--json").stdout for path in (source, tmp_path / "clean.csv")]
    assert described[0] == described[1]
    weighed = json.loads(command("weights", source, "--method", "fedla", "--json").stdout)
    assert list(weighed["weights"]) == ["north", "south"]


@pytest.mark.slow
def test_a_config_and_its_run_count_what_clients_train_on(digits, tmp_path, command):
    digits.write_text("seeds = [3]" + digits.read_text().replace('"iid"', '"quantity", labels_per_client = 2'))
    (tmp_path / "my").mkdir()
    for _ in range(2):  # in a folder of the run's name, and in one of data that digits are not read from
        counted = command("counts", "my.toml", "--out", "my/counts.csv", FEDSKEW_DATA=str(tmp_path))
    assert (counted.returncode, counted.stdout) == (0, "")
    counts = LabelCounts.read_csv(tmp_path / "my" / "counts.csv")
    assert counts.counts.shape == (10, 10)
    assert ((counts.counts > 0).sum(axis=1) <= 2).all()
    command("run", "my.toml")
    (run,) = (tmp_path / "runs").iterdir()
    assert command("counts", run).stdout == (tmp_path / "my" / "counts.csv").read_text()
    (tmp_path / "own.csv").write_text("a,~x\n" + "1,p\n2,q\n" * 20)
    digits.write_text(digits.read_text().replace('"digits"', '"csv", root = "own.csv", label = "~x"'))
    assert command("counts", "my.toml").stdout.startswith("client,p,q")
    described = command("describe", run, "--no-picture").stdout
    assert "Figures" in described
    assert "arget: " not in described


@pytest.mark.slow
def test_a_run_whose_components_are_not_importable_here_is_counted_all_the_same(tmp_path, command):
    done = fedskew.simulate(task(4, rounds=1), target={"mix": "uniform"}, method="fedpals", out=tmp_path)
    config = done.folder / "config.toml"
    config.write_text(config.read_text().replace('"fedpals"', '"gone_elsewhere:Own"'))
    assert "gone_elsewhere" in config.read_text()
    for name in ("counts", "describe"):
        command(name, done.folder)


def test_notes_stand_apart_from_the_table(tmp_path, command):
    source = folder_of_images(tmp_path)
    (source / "north" / "flu" / "scan.nii").touch()
    (source / "north" / "Flu").mkdir()
    counted = command("counts", source)
    assert counted.stdout.startswith("client,Flu,cold,flu\n")
    assert "note: " in counted.stderr
    assert ".nii (1)" in counted.stderr
    assert "names 'Flu' and 'flu'; they are counted as 2 classes" in counted.stderr
    long = command("counts", table_of_counts(tmp_path), "--form", "long", "--totals", "keep").stdout
    assert long.splitlines()[:4] == ["client,class,count", "north,cold,1", "north,flu,2", "north,total,3"]
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 2)), y=np.array([0, 1]))
    alone = command("counts", "b.npz")
    assert alone.stdout == "client,0,1\nall,1,1\n"
    assert "names no clients" in alone.stderr


def test_a_note_on_data_that_a_run_loads_for_every_seed_is_printed_once(tmp_path, command):
    labels = np.array(["Flu", "flu"] * 10)
    np.savez(tmp_path / "a.npz", x=np.arange(40.0).reshape(20, 2), y=labels)
    (tmp_path / "my.toml").write_text(
        'seeds = [0, 1]\ndata = {name = "npz", root = "a.npz"}\nmodel = {name = "logistic"}\n'
        'partition = {rule = "iid", clients = 2}\ntraining = {rounds = 1}\n'
    )
    assert command("run", "my.toml").stderr.count("names 'Flu' and 'flu'") == 1
