from __future__ import annotations

import pytest
import torch
from torch import nn

import fedskew
from fedskew.errors import ArgumentError, CombinationError, ConfigError
from fedskew.local_steps import INDEX
from fedskew.methods import expand

FedBABU = INDEX["fedbabu"]

TASK = {
    "data": {"name": "digits"},
    "partition": {"rule": "dirichlet_by_class", "clients": 4, "beta": 0.3, "min_size": 1},
    "model": {"name": "mlp3", "width": 8},
    "training": {"rounds": 2, "batch_size": 64, "lr": 0.1, "momentum": 0.5, "weight_decay": 0.01},
}


def run(method, **more):
    return fedskew.simulate({**TASK, "method": method, **more})


def test_the_last_layer_stays_as_it_was_drawn_and_the_rest_is_trained():
    untrained = run("fedavg", training={**TASK["training"], "rounds": 0}).model.state_dict()
    trained = run("fedbabu").model.state_dict()
    still = {name for name, value in trained.items() if torch.equal(value, untrained[name])}
    assert still == {"head.weight", "head.bias"}


def test_on_a_network_whose_head_is_frozen_it_is_sgd():
    network = fedskew.models.build("mlp3", 10, (1, 8, 8), width=8, generator=torch.Generator().manual_seed(4))
    network.head.requires_grad_(False)
    ends = [run(method, model=network).model.state_dict() for method in ("fedavg", "fedbabu")]
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value)


def test_less_travels_by_the_last_layer():
    bytes_up = [run(method).rounds[-1]["bytes_up"] for method in ("fedavg", "fedbabu")]
    assert bytes_up[0] - bytes_up[1] == 4 * 4 * (8 * 10 + 10)  # four clients, numbers of 4 bytes


def test_behind_moons_projection_it_is_the_new_last_layer_that_stays():
    state = run("moon+fedbabu").model.state_dict()
    again = run("moon+fedbabu", training={**TASK["training"], "rounds": 0}).model.state_dict()
    assert torch.equal(state["head.weight"], again["head.weight"])
    assert not torch.equal(state["projection.0.weight"], again["projection.0.weight"])


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("fedbabu+adapt", "this step keeps the one that was drawn; take sgd"),
        ("fedconcat+fedbabu", "it keeps the last layer as it was drawn, .* take sgd"),
        ("fedetf+fedbabu", "puts a last layer there that is not trained either; take sgd"),
    ],
)
def test_what_makes_or_fixes_a_last_layer_is_refused(preset, reason):
    with pytest.raises(CombinationError, match=reason):
        expand({"preset": preset})


def test_a_network_without_a_head_is_refused_with_the_cure():
    with pytest.raises(ArgumentError, match=r"network: Sequential does not say .* give it a linear layer self.head"):
        FedBABU().adapt(nn.Sequential(nn.Linear(3, 2)), torch.Generator())


def test_a_network_that_is_a_head_alone_is_refused_with_the_cure():
    cure = r"FedBABU can't adapt logistic: network: Logistic has nothing to train but its last layer, .* take another"
    with pytest.raises(ConfigError, match=cure):
        fedskew.simulate({**TASK, "model": {"name": "logistic"}, "method": "fedbabu"})
