"""`fedskew watch`: what it finds, and what it says where nothing is known."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

import fedskew
from common import task

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
