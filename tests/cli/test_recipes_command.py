"""`fedskew recipes` and `fedskew reproduce` as a person uses them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_list_says_which_data_is_there(tmp_path: Path, command):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / name).touch()
    done = command("recipes", cwd=tmp_path, FEDSKEW_DATA=str(tmp_path))
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("fedentopt-table1"))
    assert "CIFAR-10 ✓, CINIC-10 ✗, CIFAR-100 ✗" in line
    assert " 360 " in line  # 120 rows of 3 seeds


@pytest.mark.slow
def test_a_recipe_is_shown_with_what_deviates_and_a_row_can_be_run(tmp_path: Path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    done = command("recipes", "fedpals-fig9", cwd=tmp_path)
    assert "Differs from the paper: learning rate, batch, rounds and local epochs are not stated" in done.stdout
    words = ("recipes", "fedpals-fig9", "--rows", "0.5,fedpals", "--config")
    (tmp_path / "my.toml").write_text(command(*words, cwd=tmp_path).stdout, encoding="utf-8")
    command("run", "my.toml", "--set", "training.rounds=1", "--seeds", "0", cwd=tmp_path)


@pytest.mark.slow
def test_a_figure_is_run_drawn_with_a_note_on_changes_and_runs_are_used_again(tmp_path: Path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    words = ("reproduce", "fedpals-fig9", "--rows", "0.5", "--rounds", "2", "--seeds", "0")
    done = command(*words, "--processes", "1", cwd=tmp_path)
    assert "2 of 2 runs" in done.stdout
    assert "Changed from the recipe: 2 of 10 rows; seeds 0 instead of 0, 1, 2, 3, 4; training.rounds = 2" in done.stdout
    (figure,) = tmp_path.glob("runs/sweep-fedpals-fig9-*/figure.png")
    assert figure.stat().st_size > 5000
    again = command(*words, cwd=tmp_path)
    assert "2 of 2 runs are finished already" in again.stdout
    page = next(tmp_path.glob("runs/sweep-fedpals-fig9-*/comparison.md")).read_text(encoding="utf-8")
    assert "fedskew reproduce fedpals-fig9 --rows 0.5 --rounds 2 --seeds 0" in page


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path: Path, command, monkeypatch):
    monkeypatch.delenv("FEDSKEW_DATA", raising=False)
    mistakes = {
        ("recipes", "--rows", "mnist"): "--rows, --config: need the name of a recipe",
        ("reproduce", "fedpals-fig99"): "did you mean 'fedpals-fig9'?",
        ("reproduce", "fedvls-table1", "--rows", "mnits"): "did you mean 'mnist'?",
        ("reproduce", "fedvls-table1", "--rows", "mnist"): "MNIST/raw/train-images-idx3-ubyte",
        ("reproduce", "fedpals-fig9", "--rounds", "0"): "rounds: must be at least 1, not 0",
    }
    for words, expected in mistakes.items():
        done = command(*words, cwd=tmp_path, status=2)
        assert expected in done.stderr
