"""`fedskew predict`, as its users call it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedskew
from conftest import Command
from fedskew import data

DIGITS = data.load("digits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fedskew.simulate(
        data="digits", partition={"rule": "quantity", "clients": 10, "labels_per_client": 5}, model="mlp3",
        training={"rounds": 2, "lr": 0.1, "epochs": 2, "momentum": 0.9}, out=tmp_path_factory.mktemp("runs"),
    ).folder  # fmt: skip
    assert folder is not None
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Thirty test digits as images, one of them twice as large."""
    (tmp_path / "images").mkdir()
    for row in range(30):
        levels = (255 * DIGITS.test_inputs[row, 0]).round().byte().numpy()
        image = Image.fromarray(levels)
        image = image.resize((16, 16), Image.Resampling.NEAREST) if row == 7 else image
        image.save(tmp_path / "images" / f"{row:02}.png")
    return tmp_path


@pytest.mark.slow
def test_a_table_for_people_and_every_probability_in_a_file(command: Command, run: Path, here: Path) -> None:
    done = command("predict", run, "images", "--csv", "all.csv", cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the first 20 of 30" in done.stdout
    assert "30 samples; " in done.stdout
    assert "1 of another size were resized to 8 x 8" in done.stdout
    assert f"model: {run / 'model.safetensors'}" in done.stdout
    with (here / "all.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = fedskew.load(run).predict((255 * DIGITS.test_inputs[:30]).round().byte())
    for row, (line, probabilities) in enumerate(zip(rows, expected, strict=True)):
        assert line["file"] == f"images/{row:02}.png"
        if row != 7:
            assert [float(line[name]) for name in "0123456789"] == pytest.approx(probabilities.tolist(), abs=1e-6)
            assert line["class"] == str(probabilities.argmax())
    assert f"{expected[0].max():.1%}" in done.stdout


def test_json_says_the_same_and_nothing_else(command: Command, run: Path, here: Path) -> None:
    np.savez(here / "x.npz", x=DIGITS.test_inputs[:3].numpy())
    done = command("predict", run, "images/03.png", "x.npz", "--json", cwd=here)
    found = json.loads(done.stdout)
    files = [entry["file"] for entry in found["predictions"]]
    assert files == ["images/03.png", "x.npz[0]", "x.npz[1]", "x.npz[2]"]
    assert found["resized"] == 0
    assert sum(found["predictions"][1]["probabilities"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_export_writes_beside_the_model_or_where_it_is_asked_to(command: Command, run: Path, here: Path) -> None:
    done = command("predict", run, "--export", "torchscript", cwd=here)
    assert (done.returncode, done.stdout) == (0, f"torchscript: {run / 'model.pt'}\n")
    command("predict", run, "--export", "torchscript", "--out", "mine.pt", cwd=here)
    assert (here / "mine.pt").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "IMAGES: give images, a folder of them or an .npz file; or --export onnx"),
        (["images", "--out", "x.pt"], "--out: says where --export writes"),
        (["--export", "tflite"], "--export: can't export as 'tflite' (known: onnx, torchscript)"),
        (["images", "--seed", "7"], "has no seed 7; its seeds: 0"),
        (["images", "--best"], "no validation samples were held out"),
        (["nowhere.png"], "nowhere.png: can't be read as an image"),
        (["wrong.npz"], "wrong.npz[0]: expected (samples, 1, 8, 8), got (2, 5)"),
        (["images", "--csv", "none/all.csv"], "none/all.csv: can't be written"),
    ],
)
def test_a_mistake_is_one_line(command: Command, run: Path, here: Path, words: list[str], message: str) -> None:
    np.savez(here / "wrong.npz", x=np.zeros((2, 5)))
    done = command("predict", run, *words, cwd=here, status=2)
    assert message in done.stderr


def test_what_is_no_run_folder_is_said(command: Command, here: Path) -> None:
    assert "images: not a run folder" in command("predict", "images", "images", cwd=here, status=2).stderr
    assert "fedskew predict runs/my-1a2b3c4d new-images/" in command("predict", "--help", cwd=here).stdout
