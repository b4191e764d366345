"""Terms that act on the features alone do nothing where no layer before the last is trained, and a run says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedskew
from fedskew.components import has
from fedskew.experiment import RunFolder
from fedskew.objectives import INDEX

TASK: dict[str, Any] = {
    "data": "digits",
    "partition": {"rule": "iid", "clients": 6},
    "training": {"rounds": 1, "batch_size": 256, "lr": 0.1},
}
SMALL = {"name": "mlp3", "width": 4}


def test_terms_declare_it():
    assert {name for name, kind in INDEX.items() if has(kind, "shapes_features")} == {
        *("fedmr", "fpl", "feddecorr", "uniformity"),
    }


@pytest.mark.parametrize("term", ["feddecorr", "uniformity"])
def test_without_a_trained_layer_before_the_last_they_change_nothing_and_the_run_says_so(term: str, tmp_path: Path):
    weighted = {"preset": "fedavg", "objective": {"extra_terms": [{"name": term, "weight": 9.0}]}}
    plain, ours = (
        fedskew.simulate({**TASK, "model": "logistic", "method": one}, out=tmp_path) for one in ("fedavg", weighted)
    )
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, ours.model.state_dict()[name])
    (note,) = RunFolder.notes(ours.folder, 0)
    assert note == (
        f"{term} acts on the features before the last layer, and Logistic trains no layer before that: the term "
        "changes nothing. Take another model, or leave it out."
    )
    assert RunFolder.notes(plain.folder, 0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method"),
    [
        (SMALL, "feddecorr"),
        ("logistic", "moon+feddecorr"),
        ("logistic", "fedetf+feddecorr"),
        (SMALL, "fedconcat+feduv"),
    ],
)
def test_where_such_a_layer_is_trained_nothing_is_said(model: Any, method: str, tmp_path: Path):
    task = {**TASK, "training": {**TASK["training"], "rounds": 2}}
    run = fedskew.simulate({**task, "model": model, "method": method}, out=tmp_path)
    assert not any("acts on the features" in note for note in RunFolder.notes(run.folder, 0))
