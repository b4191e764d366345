"""Runs behind a frozen body: the same as without kept features, whatever trains, and off where it may not be."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedskew
from fedskew.data import load

PARTITION = {"rule": "dirichlet_by_class", "clients": 6, "beta": 0.5, "min_size": 4}


class Frozen(nn.Module):
    """A convolution with batch norm below two linear layers; dropout where `p` is above 0."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(p), nn.MaxPool2d(2), nn.Flatten()
        )
        self.middle, self.head = nn.Linear(72, 16), nn.Linear(16, 10)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=drawn)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(self.body(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.fixture
def trained(tmp_path):
    return partial(train, tmp_path)


def train(folder: Path, keep: bool, *, network: nn.Module | None = None, **more):
    sections = {
        "data": {"name": "digits", "rows": 300},
        "partition": PARTITION,
        "model": {"name": network or Frozen(), "freeze": ["body.*"]},
        "training": {"rounds": 2, "participation": 0.5, "epochs": 1, "batch_size": 16, "lr": 0.1},
    }
    for name, keys in more.items():
        sections[name] = {**sections[name], **keys} if name in sections and isinstance(keys, dict) else keys
    sections["engine"] = {"backend": "sequential", "keep_features": keep, **sections.get("engine", {})}
    return fedskew.simulate(**sections, out=folder / f"{keep}-{sections['engine']['backend']}")


def state(result) -> dict[str, Tensor]:
    return result.model.state_dict()


@pytest.fixture
def notes(tmp_path):
    def read(keep: bool) -> str:
        (task,) = tmp_path.glob(f"{keep}-sequential/**/task.json")
        return " ".join(json.loads(task.read_text())["notes"])

    return read


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"method": "moon"},
        {"method": "fedvls"},
        {"method": {"preset": "fedavg", "finish": "ccvr"}},
        {
            "method": "fedpals",
            "data": {"held_out": 0.2, "validation": 0.2},
            "target": {"mix": "estimate", "truth": "uniform", "warmup": 1, "unlabelled": 40},
        },
        {"evaluation": {"clients": True}, "data": {"validation": 0.2}},
    ],
)
def test_a_run_is_the_same_but_for_rounding(more, trained, notes) -> None:
    kept, anew = trained(True, **more), trained(False, **more)
    assert "are computed once at each client" in notes(True)
    assert "engine.keep_features is off" in notes(False)
    torch.testing.assert_close(state(kept), state(anew), rtol=0, atol=2e-5)
    assert [one["bytes_up"] for one in kept.rounds] == [one["bytes_up"] for one in anew.rounds]


@pytest.mark.parametrize("personal", ["prior", "finetune", "ditto", "rod", "partial"])
def test_personal_models_are_the_same_but_for_rounding(personal: str, trained, notes) -> None:
    more = {"method": {"preset": "fedavg", "personal": personal}, "data": {"client_test": 0.3, "held_out": 0.1}}
    kept, anew = trained(True, **more), trained(False, **more)
    assert "are computed once at each client" in notes(True)
    both = list(zip(kept.sites(), anew.sites(), strict=True))
    assert {one["row"] for one, _ in both} == {"common", "personal"}
    for one, other in both:
        assert all(one[key] == other[key] for key in ("client", "row", "samples", "accuracy"))
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    torch.testing.assert_close(state(kept), state(anew), rtol=0, atol=2e-5)


def test_processes_have_the_same_bits(trained) -> None:
    one, several = trained(True), trained(True, engine={"backend": "processes", "processes": 2})
    torch.testing.assert_close(state(one), state(several), rtol=0, atol=0)


def test_samples_that_are_not_in_the_run_never_pass_the_body(trained, monkeypatch) -> None:
    passed, computed = [], nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda layer, x: passed.append(len(x)) or computed(layer, x))
    trained(True, data={"rows": 120, "validation": 0.2}, training={"participation": 1.0})
    tested = len(load("digits").test_targets)
    assert 120 + tested <= sum(passed) <= 120 + tested + 100  # those beside are to try the network out


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"training": {"augmentation": "crop_flip"}}, "training.augmentation changes the samples"),
        ({"method": "fedconcat"}, "FedConcat trains a network for each cluster"),
        ({"network": Frozen(p=0.5), "model": {"freeze": ["head.*"]}}, "no frozen layer comes before all that train"),
    ],
)
def test_where_it_may_not_be_the_notes_say_why(more, reason: str, trained, notes) -> None:
    trained(True, **more)
    assert reason in notes(True)


def test_features_of_normalised_samples_are_in_no_units(trained, notes) -> None:
    raw = load("digits")
    trained(True, data=replace(raw, mean=(0.3,), std=(0.2,)))
    assert "are computed once" in notes(True)


def test_behind_dropout_features_are_those_before_it(trained, notes) -> None:
    trained(True, network=Frozen(p=0.5))
    assert "8 x 6 x 6 numbers a sample" in notes(True)


def test_a_body_of_ones_own_that_is_frozen_is_kept_too(trained, notes) -> None:
    network = Frozen()
    network.body.requires_grad_(False)
    trained(True, network=network, model={"freeze": ["middle.*"]})
    assert "16 numbers a sample" in notes(True)


def test_a_federation_on_a_frozen_body_is_one_pass_where_the_finish_needs_features_alone(trained) -> None:
    result = trained(True, method={"preset": "fedavg", "finish": "gaussian"}, training={"rounds": 0})
    assert result.summary["finished"]["evaluation"]["accuracy"] > result.summary["final"]["accuracy"] + 0.3
    assert np.isfinite(result.summary["finished"]["evaluation"]["loss"])
