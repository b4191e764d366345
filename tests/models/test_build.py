"""The papers' networks: sizes, raw logits, and weights drawn from the given generator only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import INDEX, Network, build

SIZES = [
    # name, classes, input, parameters as in the papers or counted by hand
    ("logistic", 3, (2,), 2 * 3 + 3),
    ("logistic", 10, (1, 8, 8), 64 * 10 + 10),
    ("mlp3", 10, (1, 28, 28), 199_210),
    ("mlp3", 10, (1, 8, 8), (64 * 200 + 200) + (200 * 200 + 200) + (200 * 10 + 10)),
    ("cnn_mnist", 47, (1, 28, 28), 23_727),
    ("lenet5", 10, (3, 32, 32), 62_006),
    ("lenet5", 20, (3, 32, 32), 62_856),
    ("lenet5", 10, (1, 28, 28), 44_426),
    ("cnn_w2", 10, (3, 32, 32), 1_626_442),
    ("cnn_w2", 2, (1, 6, 8), (9 * 32 + 32) + (32 * 9 * 64 + 64) + (64 * 1 * 2 * 128 + 128) + (128 * 2 + 2)),
]


@pytest.mark.parametrize(("name", "classes", "in_shape", "parameters"), SIZES)
def test_parameter_counts_are_the_papers(name, classes, in_shape, parameters):
    assert sum(p.numel() for p in build(name, classes, in_shape).parameters()) == parameters


@pytest.mark.parametrize(("name", "classes", "in_shape", "parameters"), SIZES)
def test_logits_are_the_linear_head_on_the_features(name, classes, in_shape, parameters):
    model = build(name, classes, in_shape).eval()
    x = torch.randn(5, *in_shape, generator=torch.Generator().manual_seed(0))
    assert isinstance(model.head, nn.Linear)
    features = model.features(x)
    assert features.shape == (5, model.head.in_features)
    assert model(x).shape == (5, classes)
    torch.testing.assert_close(model(x), features @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize("name", sorted(INDEX))
def test_no_network_ends_in_a_softmax(name):
    model = build(name, 4, (1, 28, 28)).eval()
    x = 10 * torch.randn(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(model(x).logsumexp(1), torch.zeros(20), atol=1e-3)
    with torch.no_grad():
        model.head.bias += 7.0
        before = model(x)
        model.head.bias -= 7.0
    torch.testing.assert_close(before, model(x) + 7.0)


def test_pooling_before_relu_is_lenet5_as_printed():
    model = build("lenet5", 10, (3, 32, 32))
    printed = nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        model.fc1, nn.ReLU(), model.fc2, nn.ReLU(), model.head,
    )  # fmt: skip
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), printed(x))


@pytest.mark.parametrize("name", sorted(INDEX))
def test_torchs_global_generator_is_neither_read_nor_set(name):
    before = torch.get_rng_state()
    first = build(name, 10, (1, 28, 28), generator=torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    again = build(name, 10, (1, 28, 28), generator=torch.Generator().manual_seed(3))
    other = build(name, 10, (1, 28, 28), generator=torch.Generator().manual_seed(4))
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    assert not torch.equal(first.head.weight, other.head.weight)


def test_without_a_generator_the_weights_are_always_the_same():
    assert torch.equal(build("logistic", 3, (4,)).head.weight, build("logistic", 3, (4,)).head.weight)


def test_weights_follow_pytorchs_default_distributions():
    model = build("cnn_w2", 10, (3, 32, 32), generator=torch.Generator().manual_seed(0))
    # PyTorch draws weights and biases from U(-b, b), b = 1/sqrt(fan_in); the mean of squares of a uniform is b^2/3
    for layer, fan_in in ((model.conv2, 32 * 9), (model.fc1, 12544)):
        for values in (layer.weight.detach(), layer.bias.detach()):
            bound = 1 / math.sqrt(fan_in)
            error = 4 / math.sqrt(values.numel())
            assert values.abs().max() <= bound
            assert values.square().mean() == pytest.approx(bound**2 / 3, rel=error)
            assert abs(values.mean()) < bound * error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lenet", 10, (3, 32, 32)), "did you mean 'lenet5'"),
        (("lenet5", 10, (1, 8, 8)), "in_shape: lenet5 takes pictures.* at least 16 x 16"),
        (("cnn_mnist", 10, (64,)), "in_shape: cnn_mnist takes pictures"),
        (("cnn_w2", 10, (3, 5, 32)), "at least 6 x 6"),
        (("logistic", 0, (4,)), "num_classes"),
        (("logistic", 3, ()), "in_shape"),
        (("logistic", 3, (0, 4)), "in_shape"),
    ],
)
def test_what_can_not_be_built_is_refused_by_name(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        build(*arguments)


def test_an_unknown_option_is_refused():
    with pytest.raises(ArgumentError, match="width: model 'lenet5' has no such option"):
        build("lenet5", 10, (3, 32, 32), width=2)


@pytest.mark.parametrize("name", sorted(INDEX))
def test_every_network_maps_over_stacked_parameters(name):
    one, two = (build(name, 3, (1, 16, 16), generator=torch.Generator().manual_seed(s)).eval() for s in (0, 1))
    assert isinstance(one, Network)
    x = torch.randn(2, 4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    stacked = {key: torch.stack([value, two.state_dict()[key]]) for key, value in one.state_dict().items()}
    mapped = torch.func.vmap(lambda p, x: torch.func.functional_call(one, p, (x,)))(stacked, x)
    torch.testing.assert_close(mapped, torch.stack([one(x[0]), two(x[1])]))
