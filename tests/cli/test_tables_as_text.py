"""`fedskew --csv` and `--latex`: every table that a command prints, and what predict says of a threshold."""

import csv
import io
import json

import numpy as np
import pytest

from fedskew.tables import latex_table

RARE = """
name = "rare"
data = {name = "npz", root = "data.npz", validation = 0.3}
partition = {rule = "iid", clients = 3}
model = {name = "logistic"}
training = {rounds = 2, lr = 0.1}
"""


@pytest.fixture
def rare(tmp_path):
    """A config of pictures of which one in ten is bright, and these are class 1."""
    rng = np.random.default_rng(0)
    bright = (rng.random(300) < 0.1).astype(np.int64)
    pictures = (rng.integers(0, 150, (300, 4, 4)) + 70 * bright[:, None, None]).astype(np.uint8)
    parts = {"x": pictures[:200], "y": bright[:200], "x_test": pictures[200:], "y_test": bright[200:]}
    np.savez(tmp_path / "data.npz", **parts)
    np.savez(tmp_path / "new.npz", x=pictures[200:])
    (tmp_path / "rare.toml").write_text(RARE)
    return tmp_path / "rare.toml"


def test_a_table_is_csv_and_all_else_goes_beside_it(command):
    done = command("--csv", "list", "partitions")
    rows = [row for row in csv.reader(io.StringIO(done.stdout)) if row]
    assert len({len(row) for row in rows}) == 1
    assert {"shards", "quantity"} < {row[0] for row in rows}
    assert "A config names one as" in done.stderr


def test_a_table_is_latex(command, digits):
    done = command("--latex", "run", digits, "--seeds", "0,1")
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("\\begin{tabular}{l")
    assert lines[1] == "\\toprule"
    assert lines[-1] == "\\end{tabular}"
    assert "$\\pm$" in done.stdout
    assert "report:" in done.stderr


def test_what_means_something_to_latex_is_escaped():
    text = latex_table(["a_b", "50 %"], [["x & y", "0.5 ± 0.1"], ["{~^\\}", "-"]])
    assert text.splitlines() == [
        "\\begin{tabular}{lr}",
        "\\toprule",
        "a\\_b & 50 \\% \\\\",
        "\\midrule",
        "x \\& y & 0.5 $\\pm$ 0.1 \\\\",
        "\\{\\textasciitilde{}\\textasciicircum{}\\textbackslash{}\\} & - \\\\",
        "\\bottomrule",
        "\\end{tabular}",
    ]


def test_a_run_says_what_the_most_frequent_class_gets_and_predict_decides_by_the_threshold(command, rare, tmp_path):
    done = command("run", rare)
    words = " ".join(done.stdout.split())
    assert "AUROC" in words
    assert "the most frequent class of the test set, gets an accuracy of" in words
    assert "as validation samples chose" in words
    (folder,) = (tmp_path / "runs").glob("rare-*")
    threshold = json.loads((folder / "summary.json").read_text())["threshold"]["probability"]
    said = command("predict", folder, "new.npz")
    assert f"from a probability of {threshold:.3g} on" in " ".join(said.stdout.split())
    found = json.loads(command("predict", folder, "new.npz", "--json").stdout)
    assert found["threshold"] == threshold
    for one in found["predictions"]:
        assert one["class"] == ("1" if one["probabilities"]["1"] >= threshold else "0")
