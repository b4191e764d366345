"""`fedskew counts` counts labels in any data, and `describe` reads whatever `counts` takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.cli.conftest import Command

import fedskew
from fedskew.labels import LabelCounts

EXPECTED = "client,cold,flu\nnorth,1,2\nsouth,0,1\n"
SAMPLES = [("north", "flu"), ("north", "flu"), ("north", "cold"), ("south", "flu")]


def folder_of_images(here: Path) -> Path:
    for row, (client, label) in enumerate(SAMPLES):
        path = here / "images" / client / label / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(path)
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
def test_counts_are_the_same_from_every_source_and_describe_reads_it_too(tmp_path, command: Command, make) -> None:
    source = make(tmp_path)
    counted = command("counts", source, cwd=tmp_path)
    assert counted.stdout == EXPECTED
    assert counted.returncode == 0
    (tmp_path / "clean.csv").write_text(counted.stdout)
    described = [command("describe", path, "--json", cwd=tmp_path).stdout for path in (source, tmp_path / "clean.csv")]
    assert described[0] == described[1]
    weighed = json.loads(command("weights", source, "--method", "fedla", "--json", cwd=tmp_path).stdout)
    assert list(weighed["weights"]) == ["north", "south"]


@pytest.mark.slow
def test_a_config_and_its_run_count_what_clients_train_on(tmp_path: Path, command: Command) -> None:
    (tmp_path / "my.toml").write_text(
        'name = "my"\nseeds = [3]\ndata = {name = "digits"}\nmodel = {name = "logistic"}\n'
        'partition = {rule = "quantity", clients = 10, labels_per_client = 2}\ntraining = {rounds = 0}\n'
    )
    counted = command("counts", "my.toml", "--out", "counts.csv", cwd=tmp_path)
    assert (counted.returncode, counted.stdout) == (0, "")
    counts = LabelCounts.read_csv(tmp_path / "counts.csv")
    assert counts.counts.shape == (10, 10)
    assert ((counts.counts > 0).sum(axis=1) <= 2).all()
    command("run", "my.toml", cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert command("counts", run, cwd=tmp_path).stdout == (tmp_path / "counts.csv").read_text()
    described = command("describe", run, "--no-picture", cwd=tmp_path).stdout
    assert "Figures" in described
    assert "arget: " not in described


@pytest.mark.slow
def test_a_run_whose_components_are_not_importable_here_is_counted_all_the_same(
    tmp_path: Path, command: Command
) -> None:
    done = fedskew.simulate(
        data="digits",
        partition={"rule": "sparsity", "clients": 4, "labels_per_client": 3},
        model="logistic",
        method="fedpals",
        training={"rounds": 1, "epochs": 1, "batch_size": 200},
        out=tmp_path,
        progress=False,
    )
    config = done.folder / "config.toml"
    config.write_text(config.read_text().replace('"fedpals"', '"gone_elsewhere:Own"'))
    assert "gone_elsewhere" in config.read_text()
    for name in ("counts", "describe"):
        command(name, done.folder, cwd=tmp_path)


def test_notes_stand_apart_from_the_table(tmp_path: Path, command: Command) -> None:
    source = folder_of_images(tmp_path)
    (source / "north" / "flu" / "scan.dcm").touch()
    (source / "north" / "Flu").mkdir()
    counted = command("counts", source, cwd=tmp_path)
    assert counted.stdout.startswith("client,Flu,cold,flu\n")
    assert "note: " in counted.stderr
    assert ".dcm (1); convert DICOM to PNG" in counted.stderr
    assert "names 'Flu' and 'flu'; they are counted as 2 classes" in counted.stderr
    long = command("counts", table_of_counts(tmp_path), "--form", "long", "--totals", "keep", cwd=tmp_path).stdout
    assert long.splitlines()[:4] == ["client,class,count", "north,cold,1", "north,flu,2", "north,total,3"]
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 2)), y=np.array([0, 1]))
    alone = command("counts", "b.npz", cwd=tmp_path)
    assert alone.stdout == "client,0,1\nall,1,1\n"
    assert "names no clients" in alone.stderr


def test_a_note_on_data_that_a_run_loads_for_every_seed_is_printed_once(tmp_path: Path, command: Command) -> None:
    labels = np.array(["Flu", "flu"] * 10)
    np.savez(tmp_path / "a.npz", x=np.arange(40.0).reshape(20, 2), y=labels)
    (tmp_path / "my.toml").write_text(
        'seeds = [0, 1]\ndata = {name = "npz", root = "a.npz"}\nmodel = {name = "logistic"}\n'
        'partition = {rule = "iid", clients = 2}\ntraining = {rounds = 1}\n'
    )
    done = command("run", "my.toml", cwd=tmp_path)
    assert done.stderr.count("names 'Flu' and 'flu'") == 1


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, (), "t.csv: can't be read: No such file or directory"),
        ("a,b\n1,2\n", ("--label", "c"), "t.csv, line 1: no column 'c' for label"),
        ("a,b\n1,2\n", ("--label", "a", "--client", "z"), "no column 'z' for client"),
        ("label,client\nx,a\n,a\n", (), "t.csv, line 3, column 'label': empty"),
        ("label,client\nx,a\ny\n", (), "t.csv, line 3: 1 cells where the header has 2"),
        ("diagnosis,disease\nx,a\n", (), "several columns may be the label (diagnosis, disease); say by --label"),
        ("client,x\na,one\n", (), "line 2, column 'x': 'one', expected a number"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, command: Command, content: str | None, words: tuple[str, ...], message: str
) -> None:
    if content is not None:
        (tmp_path / "t.csv").write_text(content)
    done = command("counts", "t.csv", *words, cwd=tmp_path, status=2)
    assert message in done.stderr
