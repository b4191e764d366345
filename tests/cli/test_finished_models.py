"""The model that a method's finish made, in the tables and commands that a user sees."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import tomli_w

import fedskew
from fedskew.data import load
from fedskew.errors import RunError
from fedskew.experiment import read_runs

DIGITS = load("digits")
TASK = {
    "name": "digits",
    "data": {"name": "digits", "held_out": 0.25},
    "partition": {"rule": "dirichlet_by_client", "clients": 6, "beta": 0.5, "target_client": True},
    "model": {"name": "mlp3", "width": 12},
    "training": {"rounds": 2, "participation": 0.5, "batch_size": 32, "lr": 0.1},
}


def simulate(folder, **tables):
    return fedskew.simulate({**TASK, **tables}, out=folder, progress=False)


@pytest.mark.slow
def test_every_table_has_a_row_for_either_model(tmp_path, command):
    quick = {"name": "ccvr", "samples": 20, "ridge": 1.0}
    config = {**TASK, "method": {"preset": "fedavg", "finish": quick}, "seeds": [0, 1]}
    (tmp_path / "task.toml").write_text(tomli_w.dumps(config))
    done = command("run", "task.toml", cwd=tmp_path)
    assert "digits, as trained" in done.stdout
    assert "digits, after ccvr" in done.stdout
    folder = next((tmp_path / "runs").glob("digits-*"))
    for page in (folder / "report.html", folder / "seed-0" / "report.html"):
        if page.exists():
            text = page.read_text(encoding="utf-8")
            assert "digits, as trained" in text
            assert "digits, after ccvr" in text
    assert len(read_runs(folder)) == 2  # runs are runs, whatever a table shows of them

    del config["method"]
    sweep = f"{tomli_w.dumps(config)}\n[sweep]\nmethods = ['fedavg', 'fedavg+ccvr']\n"
    (tmp_path / "sweep.toml").write_text(sweep)
    done = command("sweep", "sweep.toml", "--processes", "1", "--out", "swept", cwd=tmp_path)
    with next((tmp_path / "swept").glob("sweep-*/table.csv")).open(newline="") as file:
        rows = [line[0] for line in csv.reader(file)]
    assert rows[1:] == ["fedavg", "fedavg+ccvr, as trained", "fedavg+ccvr, after ccvr"]
    assert "on one evaluation" in next((tmp_path / "swept").glob("sweep-*/table.md")).read_text()


@pytest.mark.slow
def test_the_finished_model_is_used_like_the_other(tmp_path, command):
    done = simulate(tmp_path, method="ccvr")
    np.savez(tmp_path / "new.npz", x=DIGITS.test_inputs[:3].numpy())
    words = ("predict", done.folder, "new.npz", "--json")
    plain, finished = (json.loads(command(*words, *more, cwd=tmp_path).stdout) for more in ((), ("--finished",)))
    assert finished["model"].endswith("finished.safetensors")
    given = [list(one["probabilities"].values()) for one in finished["predictions"]]
    np.testing.assert_allclose(
        given, fedskew.load(done.folder, finished=True).predict(DIGITS.test_inputs[:3]), atol=1e-6
    )
    assert plain["predictions"] != finished["predictions"]
    both = command(*words, "--finished", "--best", cwd=tmp_path, status=2)
    assert "made of the final model, not of the best one" in both.stderr
    other = simulate(tmp_path / "plain")
    with pytest.raises(RunError, match=r"this run's method has no finish \(method.finish\)"):
        fedskew.load(other.folder, finished=True)
    # A finished model can be moved later too, and what moves it says of which it is.
    np.savez(tmp_path / "target.npz", x=DIGITS.test_inputs[:200].numpy())
    words = ("adapt", done.folder, "--target-data", "target.npz", "--on-misfit", "warn")
    command(*words, "--finished", cwd=tmp_path)
    moved = fedskew.load(done.folder, adapted=True)
    assert moved.file.name == "finished.safetensors"


def test_a_model_that_adapt_has_moved_is_not_moved_again(tmp_path, command):
    done = simulate(tmp_path, method="adapt", training=TASK["training"] | {"rounds": 1})
    np.savez(tmp_path / "new.npz", x=DIGITS.test_inputs[:3].numpy())
    said = command("adapt", done.folder, "--target-data", "new.npz", "--finished", cwd=tmp_path, status=2)
    assert "the finish of" in said.stderr
    assert "was adapt, so that model is moved already" in " ".join(said.stderr.split())
