"""`fedskew --csv` and `--latex`: every table that a command prints, and what predict says of a threshold."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

import fedskew
from common import task
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


# `fedskew sites`: the table, who gains and who loses, JSON and CSV, and what it says where there is nothing.


CONFIG = task(4, rounds=1, lr=0.5) | {"name": "my", "data": {"name": "digits", "client_test": 0.3}}
ALONE = "{0},alone,{1},0.5,0.5,0.5,,,0.1,1.5"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run, to which what its clients get alone is added."""
    folder = fedskew.simulate(CONFIG, out=tmp_path_factory.mktemp("runs")).folder
    file = folder / "sites.csv"
    common = file.read_text().splitlines()
    alone = [ALONE.format(*line.split(",")[::2]) for line in common[1:]]
    file.write_text("\n".join([*common, *alone, ""]))
    return folder


def test_a_table_with_who_gains_and_who_loses(command, run):
    out = command("sites", run, COLUMNS="80").stdout
    assert max(map(len, out.splitlines())) <= 80
    assert "Accuracy at the clients, by their own test samples, %" in out
    rows = {line.split()[1]: line.split() for line in out.splitlines() if line.startswith(" my")}
    assert list(rows) == ["alone", "common"]
    assert rows["alone"][2:] == ["4", "50.0", "50.0", "50.0", "50.0", "0.0", "-"]
    assert "Common against alone: " in out
    assert " in the mean over 4 clients (95 % interval " in " ".join(out.split())


def test_json_and_csv_have_every_number(command, run, tmp_path):
    found = json.loads(command("sites", f"mine={run}", "--figure", "loss", "--json", "--csv", "all.csv").stdout)
    (only,) = found["runs"]
    assert (found["figure"], only["run"], only["seeds"]) == ("loss", "mine", [0])
    assert only["rows"]["alone"]["mean"] == 1.5
    (gain,) = only["gains"]
    assert gain["mean"] == pytest.approx(only["rows"]["common"]["mean"] - 1.5)
    assert gain["low"] <= gain["mean"] <= gain["high"]
    assert gain["lose"] == only["rows"]["common"]["losing"]
    with open(tmp_path / "all.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["client"], row["row"]) for row in rows[4:]] == [("mine", at, "alone") for at in "0123"]
    assert rows[4]["auroc"] == ""


def test_what_is_missing_is_said_in_one_line(command, run, tmp_path):
    plain = fedskew.simulate(CONFIG | {"data": "digits", "name": "plain"}, out=tmp_path).folder
    said = command("sites", run, plain, status=None)
    assert said.returncode
    assert "plain: its clients have no test samples of their own; train it with data.client_test = 0.3" in said.stderr
    again = fedskew.simulate(CONFIG | {"name": "again"}, out=tmp_path).folder
    (again / "sites.csv").unlink()
    assert "again: is not finished (seed 0); go on with" in command("sites", again, status=None).stderr
    over = command("sites", f"mine={run}", "--csv", f"{run}/config.toml", status=2)
    assert "config.toml: is there already, among what the command reads" in over.stderr
    assert "has seed 0 twice; give each" in command("sites", run, f"{run}/.", status=2).stderr
    assert "'accurcy' is not one of" in command("sites", run, "--figure", "accurcy", status=None).stderr


def test_without_the_row_alone_it_says_what_adds_it(command, tmp_path):
    folder = fedskew.simulate(CONFIG, out=tmp_path).folder
    assert 'evaluation.baselines = ["alone"]' in command("sites", folder).stdout


def test_what_real_sites_added_up(command, tmp_path):
    figures = {"accuracy": {"mean": 0.5, "better": 0}, "loss": {"mean": 1.25, "better": 3}}
    (tmp_path / "a=real").mkdir()
    file = tmp_path / "a=real" / "site-figures.json"
    file.write_text(json.dumps({"sites": ["ash", "birch", "cedar"], "models": {"alone": figures, "common": figures}}))
    out = command("sites", "a=real", "--figure", "loss").stdout
    assert "Means over 3 sites" in out
    assert ["alone", "0.500", "1.250", "3"] in [line.split() for line in out.splitlines()]
    assert json.loads(command("sites", "a=real", "--json").stdout)["sites"] == ["ash", "birch", "cedar"]
    assert "--csv: a=real has what its sites added up" in command("sites", "a=real", "--csv", "a.csv", status=2).stderr
    said = command("sites", "a=real", "--figure", "auroc", status=2).stderr
    assert "--figure: sites don't add up auroc; take one of accuracy, loss" in said
    file.write_text("{")
    assert "site-figures.json: can't be read" in command("sites", "a=real", status=2).stderr
