"""Networks with another end: projected, on a simplex, side by side; and features of our networks and a user's own."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from fedskew.errors import ArgumentError
from fedskew.models import (
    Concatenated,
    Dropout,
    FlatModel,
    OnPrototypes,
    OnSimplex,
    Outputs,
    Projected,
    build,
    unit_rows,
    with_features,
)

SHAPES = {"logistic": (6,), "mlp3": (6,), "cnn_mnist": (1, 28, 28), "lenet5": (3, 32, 32), "cnn_w2": (3, 32, 32)}


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(classes: int = 5, inputs: int = 6, seed: int = 0, **options) -> nn.Module:
    return build("mlp3", classes, (inputs,), generator=drawn(seed), **options)


def on_simplex(network: nn.Module, generator: torch.Generator, scale: float = 1.0, learnt: bool = True) -> nn.Module:
    return OnSimplex(network, scale, learnt=learnt, generator=generator)


ENDS = {
    "projected": (Projected, {"projection.0.weight": 200, "projection.2.bias": 0, "head.weight": 0}),
    "on a simplex": (on_simplex, {"head.weight": 0}),
    "on prototypes": (lambda network, generator: OnPrototypes(network, 1.0, generator), {"head.weight": 0}),
    "concatenated": (lambda network, generator: Concatenated(network, 2, generator), {"head.weight": 400}),
}


@pytest.mark.parametrize("end", ENDS)
def test_new_weights_come_from_the_generator_alone(end):
    make, names = ENDS[end]
    before = torch.get_rng_state()
    one, same, other = (make(mlp(), drawn(seed)).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for name, inputs in names.items():
        assert torch.equal(one[name], same[name])
        assert not torch.allclose(one[name], other[name], atol=1e-3)
        if inputs:  # PyTorch's default: uniform within 1 / sqrt(inputs)
            assert 0.9 / inputs**0.5 < one[name].abs().max() <= 1 / inputs**0.5
    assert all(torch.equal(one[name], other[name]) for name in one if name.endswith("fc1.weight"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Projected(nn.Sequential(nn.Linear(4, 3)), drawn()),
            "Sequential does not say where its projection goes",
        ),
        (lambda: Projected(nn.Linear(4, 3), drawn()), "Linear does not say where its projection goes"),
        (lambda: on_simplex(nn.Sequential(nn.Linear(3, 2)), drawn()), "Sequential .* give it a linear layer self"),
        (
            lambda: OnPrototypes(nn.Sequential(nn.Linear(3, 2)), 1.0, drawn()),
            "Sequential .* give it a linear layer self",
        ),
        (lambda: Concatenated(nn.Sequential(nn.Linear(3, 2)), 2), "Sequential does not say where its features end"),
    ],
)
def test_a_network_that_does_not_say_where_its_head_is_is_refused_with_the_cure(make, message):
    with pytest.raises(ArgumentError, match=f"^network: {message}"):
        make()


@pytest.mark.parametrize("name", SHAPES)
def test_every_network_gains_a_projection_of_256_features_before_its_head(name):
    plain = build(name, 7, SHAPES[name])
    width = plain.head.in_features
    before = sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in plain.head.parameters())
    model = Projected(plain, drawn()).eval()
    x = torch.randn(3, *SHAPES[name], generator=drawn())
    features, logits = with_features(model)(x)
    assert (features.shape, logits.shape) == ((3, 256), (3, 7))
    torch.testing.assert_close(logits, model.head(features))
    # encoder, linear d to d, linear d to 256, linear 256 to classes
    added = width * width + width + 256 * width + 256 + 7 * 256 + 7
    assert sum(p.numel() for p in model.parameters()) == before + added


def test_it_is_the_encoder_then_linear_relu_linear():
    plain = mlp()
    x = torch.randn(2, 6, generator=drawn())
    encoded = plain.features(x)
    model = Projected(plain, drawn())
    first, _, second = model.projection
    torch.testing.assert_close(model.features(x), second(torch.relu(first(encoded))))
    assert isinstance(model.encoder.head, nn.Identity)


class Own(nn.Module):
    """A user's own network that says what its features are, with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def features(self, x):
        return self.drop(self.norm(x))

    def forward(self, x):
        return self.head(self.features(x))


def test_dropout_inside_the_encoder_is_the_same_in_every_pass_of_a_step_also_of_ones_own_network():
    for network, shape, layers in ((build("cnn_w2", 4, (3, 32, 32)), (3, 32, 32), 2), (Dropout.swap(Own()), (4,), 1)):
        model = Projected(network, drawn()).train()
        assert len(Dropout.keys_of(model)) == layers
        x = torch.randn(2, *shape, generator=drawn())
        assert torch.equal(model(x), model(x))


# On a simplex.


def simplex(classes: int, generator: torch.Generator) -> torch.Tensor:
    """The corners that a network of so many outputs is compared with."""
    return on_simplex(build("logistic", classes, (1,)), generator, learnt=False).head.weight.detach()


@pytest.mark.parametrize("classes", [2, 3, 10, 200])
def test_corners_have_length_1_and_are_as_far_apart_as_can_be(classes):
    corners = simplex(classes, drawn()).double().numpy()
    expected = np.full((classes, classes), -1 / (classes - 1))
    np.fill_diagonal(expected, 1)
    np.testing.assert_allclose(corners @ corners.T, expected, atol=1e-6)
    np.testing.assert_allclose(corners.sum(axis=0), 0, atol=1e-5)


def test_it_is_turned_uniformly_whatever_signs_a_decomposition_chooses_and_one_class_has_none():
    # The sign of a corner's first coordinate would be that of the decomposition; and its mean square is 1 / C.
    first = torch.stack([simplex(3, drawn(seed))[0] for seed in range(400)])
    assert (first > 0).float().mean(dim=0).sub(0.5).abs().max() < 0.1
    assert first.square().mean(dim=0).sub(1 / 3).abs().max() < 0.06
    with pytest.raises(ArgumentError, match="classes: a simplex needs two corners at least, got 1"):
        simplex(1, drawn())


@pytest.mark.parametrize(("name", "shape"), [("logistic", (4,)), ("mlp3", (1, 8, 8)), ("lenet5", (1, 28, 28))])
def test_logits_are_the_scaled_cosines_of_any_networks_outputs_with_the_corners(name, shape):
    network = build(name, 5, shape, generator=drawn(1))
    x = torch.randn(6, *shape, generator=drawn(2))
    outputs = network(x)
    fixed = on_simplex(network, drawn(), 3.0)
    logits = 3 * unit_rows(outputs) @ simplex(5, drawn()).T
    torch.testing.assert_close(fixed(x), logits)
    torch.testing.assert_close(with_features(fixed)(x), Outputs(outputs, logits))


@pytest.mark.parametrize("learnt", [True, False])
def test_everything_is_trained_but_the_corners_and_a_fixed_scale(learnt):
    network = on_simplex(mlp(width=3), drawn(), 3.0, learnt=learnt)
    network(torch.ones(2, 6)).square().sum().backward()
    still = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert still == {"head.weight"} | (set() if learnt else {"head.scale"})


def test_outputs_of_zero_have_a_finite_gradient():
    network = build("logistic", 3, (2,))
    network.head.weight.data.zero_()
    network.head.bias.data.zero_()
    on_simplex(network, drawn())(torch.ones(1, 2)).sum().backward()
    assert network.head.weight.grad.abs().max() < 10


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e-8, 1e-4, 1.0, 1e15])
def test_rows_get_length_1_and_those_of_next_to_no_length_a_gradient_that_a_step_survives(size):
    rows = torch.full((1, 4), size, requires_grad=True)
    if size >= 1e-4:
        torch.testing.assert_close(unit_rows(rows).detach(), torch.full((1, 4), 0.5))
    else:
        unit_rows(rows)[0, 0].backward()
        assert rows.grad.abs().max() <= 1
        assert unit_rows(rows).norm() <= 1


# Encoders side by side under one head.


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
    with pytest.raises(ArgumentError, match="encoders: must be at least 1, got 0"):
        Concatenated(build("logistic", 2, (3,)), 0)


def test_its_features_are_the_encoders_one_after_another():
    networks = [mlp(seed=seed, width=7) for seed in range(3)]
    model = Concatenated(networks[0], 3)
    for place, network in enumerate(networks):
        model.put(place, network)
    x = torch.randn(4, 6, generator=drawn(9))
    expected = torch.cat([network.features(x) for network in networks], dim=1)
    features, logits = with_features(model)(x)
    assert torch.equal(features, expected)
    torch.testing.assert_close(logits, expected @ model.head.weight.T + model.head.bias)


def test_encoders_are_copies_of_their_own():
    network = mlp()
    model = Concatenated(network, 2)
    before = model.encoders[1].fc1.weight.clone()
    assert torch.equal(before, network.fc1.weight)
    with torch.no_grad():
        network.fc1.weight.add_(1.0)
        model.encoders[0].fc1.weight.zero_()
    assert torch.equal(model.encoders[1].fc1.weight, before)
    assert isinstance(network.head, nn.Linear)


def test_encoders_stay_in_eval_mode_and_as_they_are():
    model = Concatenated(Dropout.swap(Own()), 2).train()
    assert model.training
    before = {name: value.clone() for name, value in model.encoders.state_dict().items()}
    x = torch.randn(8, 4, generator=drawn(1))
    once, again = model(x), model(x)
    assert torch.equal(once, again)  # no dropout, no statistics of the batch
    once.sum().backward()
    torch.testing.assert_close(dict(model.encoders.state_dict()), before, rtol=0, atol=0)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}


def test_put_brings_statistics_too_and_leaves_the_head():
    networks = [Dropout.swap(Own()).train() for _ in range(2)]
    for place, network in enumerate(networks):
        network(torch.randn(8, 4, generator=drawn(place)) + 3 * place)
    model = Concatenated(networks[0], 2)
    head = model.head.weight.clone()
    model.put(1, networks[1])
    for encoder, network in zip(model.encoders, networks, strict=True):
        assert torch.equal(encoder.norm.running_mean, network.norm.running_mean)
        assert int(encoder.norm.num_batches_tracked) == 1
    assert torch.equal(model.head.weight, head)
    read = Concatenated(Own(), encoders=2)
    read.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, generator=drawn(5))
    assert torch.equal(read(x), model(x))
    flat = FlatModel(model)  # statistics of encoders, which are frozen, are no part of what is trained
    assert [len(part) for part in flat.read_state()] == [8 * 3 + 3, 0, 0]
    assert "encoders.1.norm.running_var" in flat.state_dict()


# Features and logits of our networks and of a user's own.

X = torch.randn(5, 1, 16, 16, generator=drawn())


def own() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, 3)).eval()
    generator = drawn(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def test_features_of_a_users_module_are_the_input_of_its_last_linear_layer_and_it_stays_as_it_is():
    model = own()
    names = list(model.state_dict())
    wrapped = with_features(model)
    outputs = wrapped(X)
    assert isinstance(outputs, Outputs)
    torch.testing.assert_close(outputs, Outputs(model[:4](X), model(X)))
    with pytest.raises(RuntimeError):
        wrapped(torch.ones(2, 5))
    assert wrapped.model is model
    assert list(model.state_dict()) == names
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    features = weakref.ref(outputs.features)  # no tensor outlives the call
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
        return super().forward(x * torch.sigmoid(self.gate(x.mean((2, 3)))[:, :, None, None]))


class Backwards(nn.Module):
    """Registers its head first; the layer that runs last counts."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(4, 4), nn.Linear(256, 4)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).relu())


def test_without_a_linear_head_the_features_are_the_logits_and_the_layer_that_runs_last_counts():
    for kind in (Convolutional, Gated):
        features, logits = with_features(kind())(X)
        assert features is logits
    model = Backwards()
    torch.testing.assert_close(with_features(model)(X).features, model.body(X.flatten(1)).relu())


@pytest.mark.parametrize(
    "make", [own, lambda: build("lenet5", 3, (1, 16, 16)), lambda: build("cnn_mnist", 3, (1, 16, 16))]
)
def test_it_maps_over_clients(make):
    model = make()
    wrapped = with_features(model)
    floats = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    stacked = {f"model.{name}": torch.stack([value, 0.5 * value]) for name, value in floats.items()}
    x = torch.stack([X, -X])

    def client(state, x):
        return torch.func.functional_call(wrapped, state, (x,))

    mapped = torch.func.vmap(client)(stacked, x)
    for k in range(2):
        alone = client({name: value[k] for name, value in stacked.items()}, x[k])
        torch.testing.assert_close(Outputs(*(part[k] for part in mapped)), alone)


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
