"""`fedskew demo`: the four methods beside FedAvg on real data that ships with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

TASK: dict[str, Any] = {
    "schema": 1,
    "name": "digits",
    "seeds": [0, 1, 2],
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 20, "beta": 0.1, "min_size": 1},
    "model": {"name": "mlp3"},
    "training": {
        "rounds": 40,
        "participation": 0.25,
        "epochs": 5,
        "batch_size": 16,
        "lr": 0.05,
    },
    "target": {"mix": [0.02, 0.02, 0.02, 0.02, 0.02, 0.18, 0.18, 0.18, 0.18, 0.18]},
    "evaluation": {"every": 2},
}
METHODS = ("fedavg", "fedentopt", "fedvls", "fedla", "fedpals")


def demo(
    out: Annotated[Path, typer.Option(help="Where the run folders and the report go.")] = Path("runs"),
) -> None:
    """Train FedAvg and the four papers' methods on digits, 20 clients under strong label skew, 3 seeds.

    Example:

        fedskew demo
    """
