"""Runs of losses that fix or set the last layer, and of terms that act on the features before it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fedskew
from common import alike, task
from fedskew.components import has
from fedskew.errors import ComponentError, ConfigError
from fedskew.experiment import RunFolder
from fedskew.hooks import Hooks
from fedskew.methods import expand
from fedskew.objectives import INDEX
from fedskew.parameters import component

TASK = task(4, beta=0.3, width=8, rounds=1, batch_size=64, lr=0.1)


def trained(method: Any, **changes: Any) -> torch.nn.Module:
    training = TASK["training"] | changes.pop("training", {})
    return fedskew.simulate({**TASK, "training": training, "method": method, **changes}).model


@pytest.mark.parametrize(("name", "scale"), [("fedetf", 1.0), ("fedgela", 5.0)])
def test_a_run_trains_all_but_its_simplex_which_is_its_seeds(name, scale):
    ends = [trained(name, seeds=[seed]).state_dict() for seed in (0, 0, 1)]
    heads = [end["head.weight"] for end in ends]
    assert torch.equal(heads[0], heads[1])
    assert not torch.allclose(heads[0], heads[2], atol=0.1)
    gram = heads[0] @ heads[0].T
    torch.testing.assert_close(gram.diagonal(), torch.ones(10))
    torch.testing.assert_close(gram[0, 1:], torch.full((9,), -1 / 9))
    assert (ends[0]["head.scale"].item() == scale) == (name == "fedgela")


def test_in_a_run_prototypes_move_a_little_to_the_classes_and_stay_unit_whatever_the_weight_decay():
    before, after = (
        trained("fednh", training={"weight_decay": 0.1, "rounds": rounds}).head.weight for rounds in (0, 2)
    )
    torch.testing.assert_close(after.norm(dim=1), torch.ones(10))
    moved = (before * after).sum(dim=1)  # every class is held by somebody
    assert ((moved > 0.9) & (moved < 0.9999)).all()


def test_in_a_run_training_weight_limit_holds_for_prototypes_too():
    free, cut = (
        trained("fednh", training=limit) for limit in ({}, {"weight_limit": 0.3})
    )  # of 4 weights it binds none
    assert alike(free, cut) == free.state_dict().keys() - {"head.weight"}


def test_scaffold_and_fednh_both_weigh_uniformly_and_either_gives_way():
    assert expand({"preset": "fednh+scaffold"})["weighting"] == {"name": "uniform"}
    assert expand({"preset": "fednh+fedla"})["weighting"] == {"name": "fedla"}


class Plain(torch.nn.Sequential):
    """A network without a layer `head`."""

    def __init__(self, num_classes, in_shape):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(math.prod(in_shape), num_classes))


def test_a_network_of_ones_own_without_a_head_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"FedETF can't adapt .*Plain: .* give it a linear layer self.head") as error:
        trained("fedetf", model={"name": f"{__name__}:Plain"})
    assert "\n" not in str(error.value)


@component
class Halved(INDEX["cross_entropy"], Hooks):
    """A loss of a user's own that sets the whole model."""

    length: int = 0

    def next_model(self, end):
        return end.new[: self.length] if self.length else end.new / 2


def test_a_hook_of_ones_own_sets_the_next_model_and_another_shape_is_one_line():
    plain, halved = (trained({"objective": loss}).state_dict() for loss in ("cross_entropy", Halved()))
    torch.testing.assert_close(dict(halved), {name: value / 2 for name, value in plain.items()})
    with pytest.raises(ComponentError, match=r"^round 1: objective .*:Halved: next_model\(\) must return"):
        trained({"objective": Halved(length=3)})


# Terms that act on the features alone do nothing where no layer before the last is trained, and a run says so.

EVEN = task(6, rounds=1, batch_size=256, lr=0.1)
SMALL = {"name": "mlp3", "width": 4}


def test_terms_declare_it():
    of_features = {name for name, kind in INDEX.items() if has(kind, "shapes_features")}
    assert of_features == {"fedmr", "fpl", "feddecorr", "uniformity"}


@pytest.mark.parametrize("term", ["feddecorr", "uniformity"])
def test_without_a_trained_layer_before_the_last_they_change_nothing_and_the_run_says_so(term: str, tmp_path: Path):
    weighted = {"preset": "fedavg", "objective": {"extra_terms": [{"name": term, "weight": 9.0}]}}
    plain, ours = (fedskew.simulate(EVEN, method=one, out=tmp_path) for one in ("fedavg", weighted))
    torch.testing.assert_close(plain.model.state_dict(), ours.model.state_dict(), rtol=0, atol=1e-6)
    assert RunFolder.notes(ours.folder, 0) == [
        f"{term} acts on the features before the last layer, and Logistic trains no layer before that: the term "
        "changes nothing. Take another model, or leave it out."
    ]
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
    tree = {**EVEN, "training": EVEN["training"] | {"rounds": 2}, "model": model, "method": method}
    run = fedskew.simulate(tree, out=tmp_path)
    assert not any("acts on the features" in note for note in RunFolder.notes(run.folder, 0))
