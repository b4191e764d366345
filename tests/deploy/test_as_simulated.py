"""A federation of sites is the federation that was simulated: the same cohorts, weights, and model."""

from pathlib import Path

import numpy as np
import pytest
from federated import FEDPALS, federate, tree

ADAMW = {"optimizer": "adamw", "momentum": 0.0, "lr": 0.003}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("scaffold", {}),
        ("moon+fedentopt+fedla", {"participation": 0.67}),
        (FEDPALS, {}),
        ("fednova+fedetf", {"epochs": 2}),  # every site draws the same simplex
        ("fednh", {"participation": 0.67}),
        ("fedcbs+feddisco+feddyn", {"participation": 0.67}),
        ("afl", ADAMW | {"keep_optimizer": True, "participation": 0.67}),
        *(
            pytest.param(name, {}, marks=pytest.mark.whole_product)
            for name in ("fedavg", "fedgf", "fedmr", "fedadam", "fedvls", "seol_kim", "fedacg")
        ),
    ],
    ids=str,
)
def test_sites_train_what_was_simulated(tmp_path: Path, method: object, more: dict[str, float]) -> None:
    config = tree(method, rounds=2, **more)  # type: ignore[arg-type]
    config["target"] = {"mix": "uniform"}
    federation = federate(tmp_path, config)

    simulated, deployed = federation.as_simulated()

    assert len(deployed.rounds) == len(simulated.rounds) == 3
    for here, there in zip(simulated.rounds, deployed.rounds, strict=True):
        assert there.cohort == here.cohort
        assert there.answered == here.answered
        assert there.steps == here.steps
        np.testing.assert_allclose(there.weights, here.weights, rtol=1e-6)
        # The test samples are at the sites here, and together they are the simulation's.
        assert np.abs(np.subtract(there.evaluation.confusion, here.evaluation.confusion)).sum() <= 2
        assert there.evaluation.loss == pytest.approx(here.evaluation.loss, rel=1e-4)
