"""Accepted combinations train, checkpoint and resume bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from common import some_first, task
from covering import PARAMETERS, Cell, covering_set, few, whole_product
from fedskew.experiment import make_training_loop, resolve
from fedskew.methods import PRESETS
from fedskew.methods.catalogue import COMBINATIONS
from fedskew.pipelines import INDEX

TRAINING = {"rounds": 3, "participation": 0.5, "epochs": 1, "batch_size": 64, "lr": 0.05, "momentum": 0.5}
TASK = task(6, beta=0.2, width=12, **TRAINING) | {
    "data": {"name": "digits", "rows": 600, "validation": 0.1},
    "target": {"mix": [0.02] * 5 + [0.18] * 5},
    "conditions": {"dropout": 0.34, "stragglers": 0.5},
    "output": {"checkpoint_every": 2},
}


def _trains_and_resumes(method: dict[str, Any] | str, folder: Path) -> None:
    """Go through without a break, and from a copy of the folder as a kill at the end of round 3 leaves it."""
    whole, killed = folder / "whole", folder / "killed"

    def copy_at_the_end(record: dict[str, Any]) -> None:
        if record["round"] == 3:  # the last checkpoint is that of round 2
            shutil.copytree(whole, killed)

    config = resolve({**TASK, "method": method})
    if "personal" in config.method:  # it is tested at the clients
        config = resolve({**TASK, "method": method, "data": {**TASK["data"], "client_test": 0.2, "held_out": 0.1}})
    through = make_training_loop(config, 0, whole).run(progress=copy_at_the_end)
    resumed = make_training_loop(config, 0, killed).run(resume=True)
    assert [record.round for record in resumed.rounds] == [0, 1, 2, 3]
    assert resumed.rounds[2].seconds == through.rounds[2].seconds  # restored, not trained again
    assert not any(record.diverged for record in resumed.rounds)
    finished = ["finished.safetensors"] if "finish" in config.method else []
    for file in ("model.safetensors", "best.safetensors", *finished):
        assert (killed / file).read_bytes() == (whole / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("cell", some_first(few(), covering_set()), ids=str)
def test_every_accepted_pair_of_components_trains_and_resumes_bit_for_bit(cell: Cell, tmp_path):
    _trains_and_resumes(cell.tables(), tmp_path)


def has_parts(tables: dict[str, Any]) -> bool:
    """Whether a preset is not one component under its own name."""
    return len(tables) != 1 or len(tables.get("objective", {}).get("terms", [])) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some_first([*(name for name in PRESETS if has_parts(PRESETS[name])), *INDEX], [*PRESETS, *COMBINATIONS]),
)
def test_every_named_method_trains_and_resumes_bit_for_bit(name, tmp_path):
    # Krum's default needs five clients; here three take part.
    krum = {"preset": "krum", "aggregation": PARAMETERS["aggregation.krum"]}
    _trains_and_resumes(krum if name == "krum" else name, tmp_path)


@pytest.mark.whole_product
def test_the_whole_product_trains(subtests):
    for cell in whole_product():
        if cell.accepted:
            with subtests.test(cell=str(cell)):
                config = resolve({**TASK, "method": cell.tables(), "training": TRAINING | {"rounds": 2}})
                assert make_training_loop(config, 0).run().rounds[-1].evaluation is not None
