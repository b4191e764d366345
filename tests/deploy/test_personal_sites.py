"""Sites that keep something for themselves: layers that never leave them, and models of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federated import Federated, LocalGrid, federate, tree
from flwr.app import Message
from safetensors.torch import load_file

from fedskew.deploy import client_app
from fedskew.errors import ConfigError
from fedskew.experiment import make_task, make_training_loop, resolve

FEDPER = {"preset": "fedavg", "personal": {"name": "partial", "keep": "head"}}
HEAD = ("head.weight", "head.bias")


def partial(folder: Path, personal: Any = FEDPER["personal"], **agreed: Any) -> Federated:
    """Sites that keep their last layer."""
    return federate(folder, tree({"preset": "fedavg", "personal": personal}, rounds=2), **agreed)


def listening(federation: Federated) -> tuple[LocalGrid, list[tuple[Message, Message]]]:
    """A grid, and every question to a site with its answer."""
    heard: list[tuple[Message, Message]] = []

    def hear(question: Message, answer: Message) -> Message:
        heard.append((question, answer))
        return answer

    return federation.grid(dict.fromkeys(federation.names, hear)), heard


def test_no_layer_that_a_site_keeps_leaves_it(tmp_path: Path) -> None:
    grid, heard = listening(federation := partial(tmp_path))
    federation.first_rounds(grid)
    trained = [(asked, answer) for asked, answer in heard if asked.metadata.message_type == "train"]
    assert len(trained) == 3
    for asked, answer in trained:
        before, after = asked.content["arrays"], answer.content["arrays"]
        same = [name for name in before if np.array_equal(before[name].numpy(), after[name].numpy())]
        assert [name for name in before if name not in same], "it trains the others"
        assert sorted(same) == sorted(HEAD)
    kept = [load_file(path) for path in (federation.folder / "ash" / "state").glob("*/1.safetensors")]
    drawn = trained[0][0].content["arrays"][HEAD[0]].numpy()
    (state,) = kept
    assert not np.allclose(state["private.parameters"].numpy()[: drawn.size], drawn.ravel(), atol=1e-3)


def simulated(federation: Federated, folder: Path) -> Path:
    """Divide the sites' samples as a simulation does, of which each client has test samples; simulate it."""
    config = resolve({**federation.config.tree(), "data": {**federation.config.tree()["data"], "client_test": 0.3}})
    task, whole = make_task(config, 3), np.load(federation.folder / "whole.npz")
    for name, own, test in zip(federation.names, task.partition.indices, task.client_test, strict=True):
        parts = {"x": own, "y": own, "x_test": test, "y_test": test}
        np.savez(federation.folder / name / "own.npz", **{key: whole[key[0]][rows] for key, rows in parts.items()})
    make_training_loop(config, 3, folder, task).run()
    return folder


@pytest.mark.slow
def test_a_site_goes_on_with_its_own_layers_as_in_the_simulation(tmp_path: Path) -> None:
    federation = partial(tmp_path)
    ours = load_file(simulated(federation, tmp_path / "simulated") / "model.safetensors")
    federation.play(stop=1)  # the server is killed, and started again
    federation.play()
    theirs = load_file(federation.run_folder / "model.safetensors")
    for name, values in ours.items():
        torch.testing.assert_close(theirs[name], values, rtol=1e-4, atol=1e-5)


def test_a_flower_project_of_one_s_own_keeps_nothing_for_its_sites() -> None:
    with pytest.raises(ConfigError, match="method.personal: it needs fedskew's own sites"):
        client_app(torch.nn.Linear(2, 2), lambda context: None, FEDPER)  # type: ignore[arg-type, return-value]
