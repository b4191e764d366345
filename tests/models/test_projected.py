from __future__ import annotations

import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import Dropout, Projected, build, with_features

SHAPES = {"logistic": (6,), "mlp3": (6,), "cnn_mnist": (1, 28, 28), "lenet5": (3, 32, 32), "cnn_w2": (3, 32, 32)}


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", SHAPES)
def test_every_network_gains_a_projection_of_256_features_before_its_head(name):
    plain = build(name, 7, SHAPES[name])
    width = plain.head.in_features
    before = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in plain.head.parameters())
    model = Projected(plain, drawn()).eval()
    x = torch.randn(3, *SHAPES[name], generator=drawn())
    features, logits = with_features(model)(x)
    assert features.shape == (3, 256)
    assert logits.shape == (3, 7)
    torch.testing.assert_close(logits, model.head(features))
    # encoder, linear d to d, linear d to 256, linear 256 to classes
    assert sum(p.numel() for p in model.parameters()) == (
        before + width * width + width + 256 * width + 256 + 7 * 256 + 7
    )


def test_it_is_the_encoder_then_linear_relu_linear():
    plain = build("mlp3", 4, (5,))
    x = torch.randn(2, 5, generator=drawn())
    encoded = plain.features(x)
    model = Projected(plain, drawn())
    first, _, second = model.projection
    torch.testing.assert_close(model.features(x), second(torch.relu(first(encoded))))
    assert isinstance(model.encoder.head, nn.Identity)


def test_new_weights_come_from_the_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (Projected(build("mlp3", 4, (5,)), drawn(seed)) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for layer in ("projection.0.weight", "projection.2.bias", "head.weight"):
        assert torch.equal(one.state_dict()[layer], same.state_dict()[layer])
        assert not torch.equal(one.state_dict()[layer], other.state_dict()[layer])
    assert torch.equal(one.state_dict()["encoder.fc1.weight"], other.state_dict()["encoder.fc1.weight"])
    # PyTorch's default: uniform within 1 / sqrt(inputs), 200 of them
    assert 0.9 / 200**0.5 < one.projection[0].weight.abs().max() <= 1 / 200**0.5


def test_dropout_inside_the_encoder_is_the_same_in_every_pass_of_a_step():
    model = Projected(build("cnn_w2", 4, (3, 32, 32)), drawn()).train()
    assert len(Dropout.keys_of(model)) == 2
    x = torch.randn(2, 3, 32, 32, generator=drawn())
    assert torch.equal(model(x), model(x))


class Own(nn.Module):
    """A user's own network that says what its features are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)

    def features(self, x):
        return self.layers(x)

    def forward(self, x):
        return self.head(self.features(x))


def test_a_network_of_ones_own_with_features_and_head_is_projected():
    model = Projected(Dropout.swap(Own()), drawn())
    x = torch.ones(2, 4)
    assert model(x).shape == (2, 3)
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("network", [nn.Sequential(nn.Linear(4, 3)), nn.Linear(4, 3)])
def test_a_network_that_does_not_say_is_refused(network):
    with pytest.raises(ArgumentError, match=r"^network: (Sequential|Linear) does not say where its projection goes"):
        Projected(network, drawn())
