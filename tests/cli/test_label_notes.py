"""What a run's labels don't allow is said when it begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CONFIG = """
seeds = [0, 1]
data.name = "digits"
partition = {rule = "sparsity", clients = 4, labels_per_client = 2}
model.name = "logistic"
method.preset = "fedlc"
training = {rounds = 1, batch_size = 64}
"""


def test_a_run_begins_with_a_note_for_each_seed_that_has_one(tmp_path: Path, command):
    (tmp_path / "my.toml").write_text(CONFIG, encoding="utf-8")
    done = command("run", "my.toml", cwd=tmp_path)
    assert "note on run, seed 0: fedlc tells two classes apart only where some client holds both. Here " in done.stdout
    assert "No client holds class" in done.stdout
    plain = command("run", "my.toml", "--method", "fedavg", "--set", "partition.covered=true", cwd=tmp_path)
    assert "note on" not in plain.stdout


def test_a_method_is_listed_with_what_it_relies_on(tmp_path: Path, command):
    assert (
        "Tells two classes apart only where some client holds both" in command("methods", "fedlc", cwd=tmp_path).stdout
    )
    assert "Tells two classes apart" not in command("methods", "fedrs", cwd=tmp_path).stdout


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


def test_a_class_that_only_the_test_part_has_is_said(tmp_path: Path, command):
    rows(tmp_path, [0, 0, 1, 1] * 5, [0, 1, 2, 2])
    (tmp_path / "my.toml").write_text(ROWS.format(more=""), encoding="utf-8")
    done = command("run", "my.toml", cwd=tmp_path)
    assert "No client holds class 2, 50% of the test part" in done.stdout


def test_clients_with_one_class_only_are_told_so(tmp_path: Path, command):
    rows(tmp_path, [0] * 20, [0, 0, 0, 0])
    (tmp_path / "my.toml").write_text(ROWS.format(more=""), encoding="utf-8")
    done = command("run", "my.toml", cwd=tmp_path)
    assert "All samples of the clients are of class 0: there is nothing to tell apart" in done.stdout


def test_target_shares_that_do_not_add_up_are_refused(tmp_path: Path, command):
    rows(tmp_path, [0, 0, 1, 1] * 5, [0, 1])
    (tmp_path / "my.toml").write_text(ROWS.format(more="target.mix = [0.4, 0.4]"), encoding="utf-8")
    done = command("run", "my.toml", cwd=tmp_path, status=2)
    assert "target.mix: the shares sum to 0.8; give shares that sum to 1" in done.stderr
