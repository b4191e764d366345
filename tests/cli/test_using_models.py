"""The model that a method's finish made, in the tables and commands that a user sees."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image
from sklearn.datasets import load_breast_cancer

import fedskew
from common import TO_FINISH, task
from fedskew.data import load
from fedskew.errors import RunError
from fedskew.experiment import RunFolder

DIGITS = load("digits")


def simulate(folder, **tables):
    return fedskew.simulate({**TO_FINISH, **tables}, out=folder, progress=False)


@pytest.mark.slow
def test_every_table_has_a_row_for_either_model(tmp_path, command):
    quick = {"name": "ccvr", "samples": 20, "ridge": 1.0}
    config = {**TO_FINISH, "method": {"preset": "fedavg", "finish": quick}, "seeds": [0, 1]}
    (tmp_path / "task.toml").write_text(tomli_w.dumps(config))
    done = command("run", "task.toml")
    assert "digits, as trained" in done.stdout
    assert "digits, after ccvr" in done.stdout
    folder = next((tmp_path / "runs").glob("digits-*"))
    for page in (folder / "report.html", folder / "seed-0" / "report.html"):
        if page.exists():
            text = page.read_text(encoding="utf-8")
            assert "digits, as trained" in text
            assert "digits, after ccvr" in text
    assert len(RunFolder.read_runs(folder)) == 2  # runs are runs, whatever a table shows of them

    del config["method"]
    sweep = f"{tomli_w.dumps(config)}\n[sweep]\nmethods = ['fedavg', 'fedavg+ccvr']\n"
    (tmp_path / "sweep.toml").write_text(sweep)
    done = command("sweep", "sweep.toml", "--processes", "1", "--out", "swept")
    with next((tmp_path / "swept").glob("sweep-*/table.csv")).open(newline="") as file:
        rows = [line[0] for line in csv.reader(file)]
    assert rows[1:] == ["fedavg", "fedavg+ccvr, as trained", "fedavg+ccvr, after ccvr"]
    assert "on one evaluation" in next((tmp_path / "swept").glob("sweep-*/table.md")).read_text()


@pytest.mark.slow
def test_the_finished_model_is_used_like_the_other(tmp_path, command):
    done = simulate(tmp_path, method="ccvr")
    np.savez(tmp_path / "new.npz", x=DIGITS.test_inputs[:3].numpy())
    words = ("predict", done.folder, "new.npz", "--json")
    plain, finished = (json.loads(command(*words, *more).stdout) for more in ((), ("--finished",)))
    assert finished["model"].endswith("finished.safetensors")
    given = [list(one["probabilities"].values()) for one in finished["predictions"]]
    np.testing.assert_allclose(
        given, fedskew.load(done.folder, finished=True).predict(DIGITS.test_inputs[:3]), atol=1e-6
    )
    assert plain["predictions"] != finished["predictions"]
    assert "made of the final model, not of the best one" in command(*words, "--finished", "--best", status=2).stderr
    other = simulate(tmp_path / "plain")
    with pytest.raises(RunError, match=r"this run's method has no finish \(method.finish\)"):
        fedskew.load(other.folder, finished=True)
    # A finished model can be moved later too, and what moves it says of which it is.
    np.savez(tmp_path / "target.npz", x=DIGITS.test_inputs[:200].numpy())
    words = ("adapt", done.folder, "--target-data", "target.npz", "--on-misfit", "warn")
    command(*words, "--finished")
    assert fedskew.load(done.folder, adapted=True).file.name == "finished.safetensors"


def test_a_model_that_adapt_has_moved_is_not_moved_again(tmp_path, command):
    done = simulate(tmp_path, method="adapt", training=TO_FINISH["training"] | {"rounds": 1})
    np.savez(tmp_path / "new.npz", x=DIGITS.test_inputs[:3].numpy())
    said = command("adapt", done.folder, "--target-data", "new.npz", "--finished", status=2)
    assert "the finish of" in said.stderr
    assert "was adapt, so that model is moved already" in " ".join(said.stderr.split())


# `fedskew predict`, as its users call it.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = task(10, labels=5, width=200, rounds=2, lr=0.1, epochs=2, momentum=0.9)
    folder = fedskew.simulate(tree, out=tmp_path_factory.mktemp("runs")).folder
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
def test_a_table_for_people_and_every_probability_in_a_file(command, run, here):
    done = command("predict", run, "images", "--csv", "all.csv")
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


def test_json_says_the_same_and_nothing_else(command, run, here):
    np.savez(here / "x.npz", x=DIGITS.test_inputs[:3].numpy())
    found = json.loads(command("predict", run, "images/03.png", "x.npz", "--json").stdout)
    files = [entry["file"] for entry in found["predictions"]]
    assert files == ["images/03.png", "x.npz[0]", "x.npz[1]", "x.npz[2]"]
    assert found["resized"] == 0
    assert sum(found["predictions"][1]["probabilities"].values()) == pytest.approx(1)


@pytest.mark.slow
def test_export_writes_beside_the_model_or_where_it_is_asked_to(command, run, here):
    done = command("predict", run, "--export", "torchscript")
    assert (done.returncode, done.stdout) == (0, f"torchscript: {run / 'model.pt'}\n")
    for place in ("mine.pt", run / "mine.pt", run / "mine.pt"):
        command("predict", run, "--export", "torchscript", "--out", place)
    assert (here / "mine.pt").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "FILES: give images, a folder of them, an .npz or CSV file; or --export onnx"),
        (["images", "--out", "x.pt"], "--out: says where --export writes"),
        (["--export", "onnx", "--csv", "a.csv"], "FILES: --csv, --json and --skip-broken are of predictions"),
        (["--export", "tflite"], "--export: can't export as 'tflite' (known: onnx, torchscript, weights, adapters)"),
        (["images", "--seed", "7"], "has no seed 7; its seeds: 0"),
        (["images", "--best"], "no validation samples were held out"),
        (["nowhere.png"], "nowhere.png: there is no such file or folder"),
        (["wrong.npz"], "wrong.npz: the model takes samples of shape (1, 8, 8), not (5,)"),
        (["ok.npz", "--csv", "ok.npz"], "ok.npz: is there already, among what the command reads; write to"),
        (["images", "--csv", "images/03.png"], "images/03.png: is there already"),
        (["nowhere.png", "--csv", "RUN/config.toml"], "config.toml: is there already"),
        (["--export", "torchscript", "--out", "RUN/config.toml"], "config.toml: is there already"),
        (["images", "--export", "torchscript", "--out", "a.pt", "--csv", "a.pt"], "a.pt is where --export writes"),
    ],
)
def test_a_mistake_is_one_line(command, run, here, words, message):
    np.savez(here / "wrong.npz", x=np.zeros((2, 5)))
    np.savez(here / "ok.npz", x=np.zeros((2, 8, 8)))
    assert message in command("predict", run, *(word.replace("RUN", str(run)) for word in words), status=2).stderr


# `fedskew watch`: what it finds, and what it says where nothing is known.


TABLE = load_breast_cancer()
NAMES = [name.replace(" ", "_") for name in TABLE.feature_names]


def write(path: Path, rows: np.ndarray, values: np.ndarray, labelled: bool = True) -> Path:
    header = [*NAMES, "label"] if labelled else NAMES
    lines = [
        [*map(str, row), *([str(TABLE.target_names[TABLE.target[at]])] if labelled else [])]
        for row, at in zip(values, rows, strict=True)
    ]
    path.write_text("\n".join(",".join(line) for line in [header, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, Path]:
    """A run on a part of a table, the rows of the rest, and where the tables are."""
    folder = tmp_path_factory.mktemp("watch")
    order = np.random.default_rng(0).permutation(len(TABLE.data))
    write(folder / "ours.csv", order[:269], TABLE.data[order[:269]])
    columns = {name: {"kind": "number"} for name in NAMES} | {"label": {"kind": "label"}}
    data = {"name": "csv", "root": str(folder / "ours.csv"), "schema": {"columns": columns}, "held_out": 0.3}
    result = fedskew.simulate(task(3, rounds=5, lr=0.1), data=data, out=folder / "runs")
    return result.folder, order[269:], folder


def test_what_changed_is_said_and_what_did_not(trained, command):
    run, rows, folder = trained
    same = write(folder / "same.csv", rows, TABLE.data[rows], labelled=False)
    said = command("watch", run, same).stdout
    assert "None of 465 tests finds a change from the training samples." in said
    assert "Least sure is the share of malignant" in " ".join(said.split())
    values = TABLE.data[rows].copy()
    values[:, 0] += 4
    shifted = write(folder / "shifted.csv", rows, values, labelled=False)
    said = command("watch", run, shifted).stdout
    assert "Not the samples of training: 1 column has changed" in " ".join(said.split())
    found = json.loads(command("watch", run, shifted, "--json", "--csv", "tests.csv").stdout)
    assert len(found["tests"]) == 465
    radius = next(test for test in found["tests"] if test["what"] == "mean_radius")
    assert radius["p"] < 0.01
    assert radius["now"] - radius["before"] == pytest.approx(4, abs=1)
    assert found["label_mix"]["classes"] == ["benign", "malignant"]


def test_where_nothing_is_known(trained, command):
    run, rows, folder = trained
    few = write(folder / "few.csv", rows[:3], TABLE.data[rows[:3]], labelled=False)
    assert "3 samples of the target can't show" in command("watch", run, few, status=2).stderr
    kept = (run / "inputs.json").read_bytes()
    (run / "inputs.json").write_text("[]")
    assert "inputs.json: damaged" in command("watch", run, few, status=2).stderr
    (run / "inputs.json").unlink()
    said = command("watch", run, few, status=2).stderr
    assert "inputs.json: there is none" in said
    assert "of real sites with input_profile" in said
    (run / "inputs.json").write_bytes(kept)
