"""What a run's labels don't allow is said when it begins."""

from __future__ import annotations

from pathlib import Path

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
    assert done.returncode == 0, done.stderr
    assert "note on run, seed 0: fedlc tells two classes apart only where some client holds both. Here " in done.stdout
    assert "No client holds class" in done.stdout
    plain = command("run", "my.toml", "--method", "fedavg", "--set", "partition.covered=true", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert "note on" not in plain.stdout


def test_a_method_is_listed_with_what_it_relies_on(tmp_path: Path, command):
    assert (
        "Tells two classes apart only where some client holds both" in command("methods", "fedlc", cwd=tmp_path).stdout
    )
    assert "Tells two classes apart" not in command("methods", "fedrs", cwd=tmp_path).stdout
