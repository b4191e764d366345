"""What the README shows works as it stands."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from fedskew.cli import main

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Scripts are written and run in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
def test_training_from_python_works_as_shown(tmp_path, capsys):
    (tmp_path / "train.py").write_text(BLOCKS[0], encoding="utf-8")
    runpy.run_path("train.py", run_name="__main__")
    assert float(capsys.readouterr().out) > 0.3
    assert (tmp_path / "report.html").exists()


def test_a_method_of_ones_own_takes_under_40_lines_and_works_as_shown(tmp_path, capsys):
    own = BLOCKS[1]
    assert len(own.splitlines()) < 40
    (tmp_path / "sqrt_weights.py").write_text(own, encoding="utf-8")
    runpy.run_path("sqrt_weights.py", run_name="__main__")
    assert capsys.readouterr().out.startswith("[0.")


@pytest.mark.slow
def test_a_method_of_ones_own_can_be_named_in_a_config(tmp_path, monkeypatch):
    (tmp_path / "sqrt_weights.py").write_text(BLOCKS[1], encoding="utf-8")
    (tmp_path / "own.toml").write_text(
        """
        data = {name = "digits"}
        partition = {rule = "quantity", clients = 10, labels_per_client = 3}
        model = {name = "logistic"}
        training = {rounds = 1}
        [method.weighting]
        name = "sqrt_weights:RootWeights"
        power = 0.25
        """,
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "argv", ["fedskew", "run", "own.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_every_file_that_the_readme_points_to_is_there():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"recipes/[\w.-]+\.toml", text):
        assert (REPOSITORY / target).exists(), target
