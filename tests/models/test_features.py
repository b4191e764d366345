"""Features and logits of our networks and of a user's own."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import Dropout, Outputs, build, with_features

X = torch.randn(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def own() -> nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, 3)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def test_features_of_a_users_module_are_the_input_of_its_last_linear_layer():
    model = own()
    features, logits = with_features(model)(X)
    torch.testing.assert_close(features, model[:4](X))
    torch.testing.assert_close(logits, model(X))


def test_a_users_module_stays_as_it_is():
    model = own()
    names = list(model.state_dict())
    wrapped = with_features(model)
    assert isinstance(wrapped(X), Outputs)
    with pytest.raises(RuntimeError):
        wrapped(torch.ones(2, 5))
    assert wrapped.model is model
    assert list(model.state_dict()) == names
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_no_tensor_outlives_the_call():
    outputs = with_features(own())(X)
    features = weakref.ref(outputs.features)
    del outputs
    assert features() is None


class Convolutional(nn.Module):
    """No linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)

    def forward(self, x):
        return self.conv(x).mean((2, 3))


class Gated(Convolutional):
    """A linear layer in the middle, which is not the head."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(1, 1)

    def forward(self, x):
        return self.conv(x * torch.sigmoid(self.gate(x.mean((2, 3)))[:, :, None, None])).mean((2, 3))


@pytest.mark.parametrize("kind", [Convolutional, Gated])
def test_without_a_linear_head_the_features_are_the_logits(kind):
    features, logits = with_features(kind())(X)
    assert features is logits


class Backwards(nn.Module):
    """Registers its head first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.body = nn.Linear(256, 4)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


def test_the_layer_that_runs_last_counts_not_the_one_registered_last():
    model = Backwards()
    torch.testing.assert_close(with_features(model)(X).features, model.body(X.flatten(1)).relu())


@pytest.mark.parametrize(
    "make", [own, lambda: build("lenet5", 3, (1, 16, 16)), lambda: build("cnn_mnist", 3, (1, 16, 16))]
)
def test_it_maps_over_clients(make):
    model = make()
    wrapped = with_features(model)
    stacked = {
        f"model.{name}": torch.stack([value, 0.5 * value])
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }
    x = torch.stack([X, -X])

    def client(state, x):
        return torch.func.functional_call(wrapped, state, (x,))

    mapped = torch.func.vmap(client)(stacked, x)
    for k in range(2):
        alone = client({name: value[k] for name, value in stacked.items()}, x[k])
        torch.testing.assert_close(mapped.features[k], alone.features)
        torch.testing.assert_close(mapped.logits[k], alone.logits)


def test_dropout_inside_is_counted_anew_in_every_call():
    wrapped = with_features(Dropout.swap(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, 3)))).train()
    torch.testing.assert_close(wrapped(X).logits, wrapped(X).logits)


class Scores(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer


@pytest.mark.parametrize("answer", [torch.ones(5), torch.ones(5, 3, 2), (torch.ones(5, 3), None)])
def test_a_module_that_does_not_return_logits_is_refused(answer):
    with pytest.raises(ArgumentError, match=r"must return logits, a tensor \(batch, classes\)"):
        with_features(Scores(answer))(X)
