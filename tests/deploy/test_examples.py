"""The examples for Flower's users: complete app folders, which train."""

import importlib
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from federated import LocalGrid
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODES = 4


def train(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], LocalGrid]:
    """Accuracy after each round of an app folder's own server on nodes with its own client."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    monkeypatch.syspath_prepend(str(folder))
    apps = {}
    for name in ("serverapp", "clientapp"):
        module, _, attribute = project["components"][name].partition(":")
        apps[name] = getattr(importlib.import_module(module), attribute)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as Flower's runtime says
    settings = [{"partition-id": node, "num-partitions": NODES} for node in range(NODES)]
    grid = LocalGrid({100 + node: (f"node-{node}", apps["clientapp"], settings[node]) for node in range(NODES)})
    assert project["config"] == {"rounds": 5}
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={"rounds": 3})
    apps["serverapp"](grid, context)
    return grid


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flower-selection", "flower-objective"])
def test_an_example_trains(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    np.random.seed(0)  # Flower's FedAvg samples by global generators  # noqa: NPY002
    grid = train(EXAMPLES / name, monkeypatch)
    accuracies = [float(found) for found in re.findall(r"round \d+: accuracy ([\d.]+)", capsys.readouterr().out)]
    assert len(accuracies) == 3
    # Each node has two or three of ten digits: one that had learned its own alone would be right on 30 % at the most.
    assert accuracies[-1] > 0.4
    kinds = {message.metadata.message_type for message in grid.asked}
    assert ("query" in kinds) is (name == "flower-selection")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flower-selection", "flower-objective"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own
def test_flower_builds_an_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.cli.app import app

    monkeypatch.chdir(tmp_path)
    home = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = CliRunner().invoke(app, ["build", "--app", str(EXAMPLES / name)], env=home)
    assert done.exit_code == 0, done.output
    assert len(list(tmp_path.glob("*.fab"))) == 1
    assert "warning" not in done.output.lower()
