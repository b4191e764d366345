"""What the README shows works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_training_from_python_works_as_shown(tmp_path):
    done = subprocess.run([sys.executable, "-c", BLOCKS[0]], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.3
    assert (tmp_path / "report.html").exists()


def test_a_method_of_ones_own_takes_under_40_lines_and_works_as_shown(tmp_path):
    own = BLOCKS[1]
    assert len(own.splitlines()) < 40
    (tmp_path / "sqrt_weights.py").write_text(own, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "sqrt_weights.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0.")


def test_a_method_of_ones_own_can_be_named_in_a_config(tmp_path):
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
    command = [sys.executable, "-m", "fedskew", "run", "own.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_that_the_readme_points_to_is_there():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"recipes/[\w.-]+\.toml", text):
        assert (REPOSITORY / target).exists(), target
