"""A federation of sites is the federation that was simulated: the same cohorts, weights, and model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from federated import federate, tree
from safetensors.numpy import load_file

from fedskew import simulate
from fedskew.deploy._server import serve

FEDPALS = {"preset": "fedpals", "weighting": {"name": "fedpals", "ess": 0.5}}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {}),
        ("scaffold", {}),
        ("fedentopt+fedla", {"participation": 0.67}),
        (FEDPALS, {}),
        ("fedvls", {"participation": 0.67}),
        ("moon", {"participation": 0.67}),
        ("fedgf", {}),
        ("afl", {}),
        ("fednova", {"epochs": 2}),
        ("seol_kim", {}),
        ("fedmr", {}),
    ],
    ids=str,
)
def test_sites_train_what_was_simulated(tmp_path: Path, method: object, more: dict[str, float]) -> None:
    config = tree(method, **more)  # type: ignore[arg-type]
    config["target"] = {"mix": "uniform"}
    federation = federate(tmp_path, config)
    simulated = simulate(federation.config, out=tmp_path / "simulated")

    deployed = serve(federation.grid(), federation.config, federation.agreement, tmp_path / "deployed")

    assert len(deployed.rounds) == len(simulated.rounds) == 4
    for here, there in zip(simulated.rounds, deployed.rounds, strict=True):
        assert there["cohort"] == here["cohort"]
        assert there["answered"] == here["answered"]
        assert there["steps"] == here["steps"]
        np.testing.assert_allclose(there["weights"], here["weights"], rtol=1e-6)
        # The test samples are at the sites here, and together they are the simulation's.
        assert here["evaluation"] is not None
        assert there["evaluation"] is not None
        assert np.abs(np.subtract(there["evaluation"]["confusion"], here["evaluation"]["confusion"])).sum() <= 2
        assert there["evaluation"]["loss"] == pytest.approx(here["evaluation"]["loss"], rel=1e-4)
    (folder,) = (tmp_path / "deployed").iterdir()
    ours, theirs = load_file(simulated.folder / "model.safetensors"), load_file(folder / "model.safetensors")  # type: ignore[operator]
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, rtol=1e-4, atol=1e-5)
