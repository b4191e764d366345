"""Encoders side by side under one head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import Concatenated, Dropout, FlatModel, build, with_features


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Normed(nn.Module):
    """A user's own network, with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(x)))


@pytest.mark.parametrize(
    ("name", "shape", "encoder", "dim"),
    [
        ("logistic", (6,), 0, 6),
        ("mlp3", (6,), 6 * 200 + 200 + 200 * 200 + 200, 200),
        # LeNet-5: 62,006 with the 850 of its head
        ("lenet5", (3, 32, 32), 62006 - 850, 84),
    ],
)
def test_it_has_the_parameters_of_the_encoders_and_of_one_head_on_all_features(name, shape, encoder, dim):
    model = Concatenated(build(name, 10, shape), 4)
    assert sum(p.numel() for p in model.parameters()) == 4 * encoder + 4 * dim * 10 + 10
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 4 * dim * 10 + 10
    assert len(FlatModel(model).vector) == 4 * dim * 10 + 10


def test_its_features_are_the_encoders_one_after_another():
    networks = [build("mlp3", 5, (6,), generator=drawn(seed), width=7) for seed in range(3)]
    model = Concatenated(networks[0], 3)
    for place, network in enumerate(networks):
        model.put(place, network)
    x = torch.randn(4, 6, generator=drawn(9))
    expected = torch.cat([network.features(x) for network in networks], dim=1)
    features, logits = with_features(model)(x)
    assert torch.equal(features, expected)
    torch.testing.assert_close(logits, expected @ model.head.weight.T + model.head.bias)


def test_encoders_are_copies_of_their_own():
    network = build("mlp3", 5, (6,))
    model = Concatenated(network, 2)
    before = model.encoders[1].fc1.weight.clone()
    assert torch.equal(before, network.fc1.weight)
    with torch.no_grad():
        network.fc1.weight.add_(1.0)
        model.encoders[0].fc1.weight.zero_()
    assert torch.equal(model.encoders[1].fc1.weight, before)
    assert isinstance(network.head, nn.Linear)


def test_encoders_stay_in_eval_mode_and_as_they_are():
    model = Concatenated(Dropout.swap(Normed()), 2).train()
    assert model.training
    before = {name: value.clone() for name, value in model.encoders.state_dict().items()}
    x = torch.randn(8, 4, generator=drawn(1))
    once, again = model(x), model(x)
    assert torch.equal(once, again)  # no dropout, no statistics of the batch
    once.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.encoders.state_dict().items())
    assert all(p.grad is None for p in model.encoders.parameters())
    assert model.head.weight.grad is not None


def test_put_brings_statistics_too_and_leaves_the_head():
    network = Dropout.swap(Normed()).train()
    network(torch.randn(8, 4, generator=drawn(1)))
    model = Concatenated(network, 2)
    other = Dropout.swap(Normed()).train()
    other(torch.randn(8, 4, generator=drawn(2)) + 3)
    head = model.head.weight.clone()
    model.put(1, other)
    assert torch.equal(model.encoders[0].norm.running_mean, network.norm.running_mean)
    assert torch.equal(model.encoders[1].norm.running_mean, other.norm.running_mean)
    assert int(model.encoders[1].norm.num_batches_tracked) == 1
    assert torch.equal(model.head.weight, head)
    read = Concatenated(Normed(), encoders=2)
    read.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, generator=drawn(5))
    assert torch.equal(read(x), model(x))
    flat = FlatModel(model, buffers=False)  # statistics are no part of what is trained
    assert [len(part) for part in flat.read_state()] == [8 * 3 + 3, 0, 0]
    assert "encoders.1.norm.running_var" in flat.state_dict()


def test_the_head_is_drawn_from_the_generator_alone():
    before = torch.get_rng_state()
    network = build("mlp3", 5, (6,))
    one, same, other = (Concatenated(network, 2, drawn(seed)).head.weight for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    # PyTorch's default: uniform within 1 / sqrt(inputs), 400 of them
    assert 0.049 < float(one.detach().abs().max()) <= 0.05


def test_a_network_without_a_head_and_no_encoder_are_refused():
    with pytest.raises(ArgumentError, match="network: Sequential does not say where its features end"):
        Concatenated(nn.Sequential(nn.Linear(3, 2)), 2)
    with pytest.raises(ArgumentError, match="encoders: must be at least 1, got 0"):
        Concatenated(build("logistic", 2, (3,)), 0)
