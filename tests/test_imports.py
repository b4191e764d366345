"""What is imported when: who looks at label counts does not wait for PyTorch, and who trains not for what draws."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = {
    "import fedskew.labels, fedskew.weighting": {"torch", "matplotlib", "scipy", "sklearn", "opendp"},
    "import fedskew.cli": {"torch", "matplotlib", "scipy", "sklearn", "flwr"},
    "import fedskew.methods.catalogue": {"fedskew.engine", "fedskew.experiment", "matplotlib", "sklearn", "jinja2"},
    "import fedskew; fedskew.simulate": {"tensorboard", "mlflow", "wandb", "matplotlib", "sklearn"},
    "fedskew.data.load('digits')": {"matplotlib", "sklearn"},
    "fedskew.simulate(data='digits', partition={'rule': 'iid', 'clients': 2}, model='mlp3', method='moon',"
    " training={'rounds': 1}, engine={'backend': 'sequential'})": {"sympy", "matplotlib", "sklearn"},
}
"""One after another in one process, and what is still not there after each."""


@pytest.mark.slow
def test_what_is_heavy_is_imported_when_it_is_used():
    lines = ["import sys", *(f"{step}\nprint(sorted({late} & set(sys.modules)))" for step, late in STEPS.items())]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]"] * len(STEPS)
