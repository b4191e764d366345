"""A chain is the same function as its network: outputs and gradients held against autograd through the network."""

import copy
import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from numba import njit
from torch import nn
from torch.nn import functional as F

from fedskew.models import Dropout, Faster, FlatModel, OnPrototypes, OnSimplex, Outputs, build, with_features
from fedskew.models._convolutions import aligned
from fedskew.models._kernels import _whole_vectors, convolve_of, weigh_of

X = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(40) % 5


def head(values: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(values, 5)]


class Own(nn.Module):
    """A network of a user's own, with a `forward` of the test's."""

    def __init__(self, forward):
        super().__init__()
        self.conv, self.again = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.relu, self.pool, self.lengths = nn.ReLU(), nn.MaxPool2d(2), nn.LPPool2d(2, 2)
        self.block = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(12 * 64, 5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.kept, self._own_forward = 0, [], forward

    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask
        return self.head(self._own_forward(self, x).flatten(1))


class Reversed(torch.autograd.Function):
    """Passes values on, and gradients with the other sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def loss(outputs: Outputs) -> torch.Tensor:
    """Reads features and logits, as objectives may."""
    return F.cross_entropy(outputs.logits, TARGETS[: len(outputs.logits)]) + outputs.features.square().mean()


def by_autograd(module: nn.Module, x: torch.Tensor) -> tuple[Outputs, torch.Tensor, list[torch.Tensor]]:
    outputs = with_features(module)(x)
    value = loss(outputs)
    gradients = torch.autograd.grad(value, [p for p in module.parameters() if p.requires_grad], allow_unused=True)
    return outputs, value, [torch.zeros(()) if g is None else g for g in gradients]


def assert_same(module: nn.Module, x: torch.Tensor = X, chain: bool = True) -> FlatModel:
    """In both modes, for batches of several sizes, and for whole numbers, whose sums are exact and ties many."""
    normed = any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in module.modules())
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    flat = FlatModel(copy.deepcopy(module))
    if normed and flat.channels_last:  # where batch norm has other rounding
        module = copy.deepcopy(module).to(memory_format=torch.channels_last)
    for training, rows in ((True, 40), (False, 40), (True, 33), (True, 2 if normed else 1)):
        flat.network.train(training)
        flat.network.chain(x[:rows])
        outputs, value, gradients = by_autograd(module.train(training), x[:rows])
        got_value, got = flat.differentiate(x[:rows], loss)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(flat.module.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)
        assert (flat.network.chain(x[:rows]) is not None) == chain, flat.network.rules
        torch.testing.assert_close((got_value, *got), (value.detach(), *(one.detach() for one in outputs)))
        rounding = 5e-6 * max(float(one.abs().max()) for one in gradients) if normed else 1e-12
        for expected, found in zip(gradients, flat._gradients, strict=True):
            at_most = 5e-6 * float(expected.abs().max()) + rounding
            torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=at_most)
        with torch.no_grad():
            torch.testing.assert_close(flat.network(x[:rows]), outputs.logits)
            if training and normed:
                module(x[:rows])  # which moves its statistics, too
    return flat


def test_batch_norm_of_one_row_is_refused_as_pytorch_does():
    flat = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(768, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 5)))
    for rows in (2, 1):
        flat.network.train()
        if rows == 1:
            assert flat.network.chain(X[:1]) is not None
            with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
                flat.differentiate(X[:1], loss)
        else:
            flat.differentiate(X[:2], loss)
    assert int(flat.module[2].num_batches_tracked) == 1


@pytest.mark.parametrize("layers", [[nn.Linear(768, 9), nn.BatchNorm1d(9)], [nn.Dropout(0.5), nn.Linear(768, 9)]])
def test_predictions_in_training_have_the_statistics_and_the_mask_of_the_whole_batch(layers):
    module = Dropout.swap(nn.Sequential(nn.Flatten(), *layers, nn.Linear(9, 5))).train()
    network = Faster(copy.deepcopy(module)).train()
    x = X.repeat(5, 1, 1, 1)
    with torch.no_grad():
        assert network.chain(x) is not None
        torch.testing.assert_close(network(x), module(x))
    for ours, theirs in zip(network.module.buffers(), module.buffers(), strict=True):
        assert torch.equal(ours, theirs)


LAYERS = {  # a kernel is compiled for each width of a window and block of outputs, in a second: few of these here
    "linear": lambda: [nn.Flatten(), nn.Linear(768, 5)],
    "hidden": lambda: [nn.Flatten(), nn.Linear(768, 20), nn.ReLU(True), nn.Linear(20, 9, bias=False), nn.Linear(9, 5)],
    "ReLU first": lambda: [nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(768, 5)],
    "convolution": lambda: [nn.Conv2d(3, 6, 5), *head(6 * 144)],
    "ReLU": lambda: [nn.Conv2d(3, 6, 5), nn.ReLU(), *head(6 * 144)],
    "pooling": lambda: [nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), *head(6 * 36)],
    "ReLU and pooling": lambda: [nn.Conv2d(3, 6, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), *head(6 * 49)],
    "pooling and ReLU": lambda: [nn.Conv2d(3, 6, 3, padding=1), nn.MaxPool2d(2, 2), nn.ReLU(), *head(6 * 64)],
    "an odd side": lambda: [nn.Conv2d(3, 4, (4, 2)), nn.ReLU(), nn.MaxPool2d((2, 2)), *head(4 * 6 * 7)],
    "one tap": lambda: [nn.Conv2d(3, 9, 1), nn.ReLU(), nn.Conv2d(9, 7, 1), nn.ReLU(), *head(7 * 256)],
    "two": lambda: [
        nn.Conv2d(3, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(2), *head(256), nn.ReLU(), nn.Linear(5, 5),
    ],
    "three": lambda: [
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 10, (3, 5), padding=(2, 4)), nn.ReLU(), nn.Conv2d(10, 6, (7, 3)),
        nn.MaxPool2d(2), *head(6 * 5 * 8),
    ],
    "dropout": lambda: [
        nn.Conv2d(3, 12, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(432, 5),
    ],
    "dropout used twice": lambda: [nn.Flatten(), d := nn.Dropout(0.5), nn.Linear(768, 9), d, nn.Linear(9, 5)],
    "nothing": lambda: [nn.Identity(), nn.Conv2d(3, 6, 5), nn.Identity(), *head(6 * 144), nn.Identity()],
    "many channels": lambda: [
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 20, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.ReLU(),
        nn.Dropout2d(0.3), *head(20 * 49),
    ],
    "short rows": lambda: [nn.Conv2d(3, 4, 10), nn.ReLU(), nn.MaxPool2d(2), *head(4 * 9)],
    "a wide window": lambda: [nn.Conv2d(3, 4, (1, 12)), nn.ReLU(), *head(4 * 80)],
    "strides": lambda: [
        nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, (1, 2), (1, 0), bias=False), nn.ReLU(),
        nn.Conv2d(12, 6, 3, padding=(0, 1), dilation=2, groups=3), *head(24),
    ],
    "overlapping windows": lambda: [
        nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(6, 4, 3), nn.MaxPool2d(2, 1, ceil_mode=True),
        nn.ReLU(), *head(4),
    ],
    "dropout between": lambda: [
        nn.Conv2d(3, 6, 3), nn.Dropout(0.4), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(6, 5, 3),
        *head(125),
    ],
    "batch norm": lambda: [
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.BatchNorm2d(8, affine=False),
        nn.Flatten(), nn.Linear(392, 9), nn.BatchNorm1d(9, 1e-3, 0.3), nn.ReLU(), nn.Linear(9, 5),
    ],
    "batch norm without statistics": lambda: [
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), *head(8),
    ],
    "means": lambda: [
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool2d((2, 3)),
        *head(48),
    ],
    "pooling first": lambda: [nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 5, 3), nn.ReLU(), *head(5 * 36)],
    "dropout of channels": lambda: [nn.Conv2d(3, 12, 5), nn.Dropout2d(0.4), nn.MaxPool2d(2), nn.ReLU(), *head(432)],
}  # fmt: skip


@pytest.mark.parametrize("layers", LAYERS)
def test_a_chain_is_the_same_function(layers):
    module = Dropout.swap(nn.Sequential(*LAYERS[layers]()))
    assert_same(module)
    assert_same(module, X.round())


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_random_shapes_have_the_gradients_of_autograd(seed):
    drawn = random.Random(seed)
    channels, layers = 3, []
    for _ in range(drawn.randint(1, 3)):
        groups, dilation = drawn.choice([1, channels]), drawn.choice([1, 2])
        outs, kernel, padding = groups * drawn.randint(1, 5), drawn.randint(1, 3), drawn.randint(0, 2)
        stride, pool = drawn.randint(1, 2), drawn.choice([None, (2, 2, 0), (3, 2, 1), (2, 1, 0)])
        options = {"groups": groups, "dilation": dilation, "bias": drawn.random() < 0.5}
        layers.append(nn.Conv2d(channels, outs, kernel, stride, padding, **options))
        layers += drawn.sample(
            [nn.ReLU(), nn.Dropout(0.2), nn.Dropout2d(0.2), *([nn.MaxPool2d(*pool)] if pool else [])], 2
        )
        channels = outs
    layers.insert(1, nn.Dropout(0.1))  # between a convolution and a pooling: PyTorch's functions
    with torch.no_grad():
        values = nn.Sequential(*layers)(X[:1]).numel()
    flat = FlatModel(Dropout.swap(nn.Sequential(*layers, *head(values))))
    for training in (True, False):
        flat.network.train(training)
        _, _, expected = by_autograd(flat.module, X)
        flat.differentiate(X, loss)
        assert flat.network.chain(X) is not None, flat.network.rules
        apart = [(found - own).norm() for found, own in zip(flat._gradients, expected, strict=True)]
        assert torch.stack(apart).norm() <= 1e-6 * torch.stack([own.norm() for own in expected]).norm()


@pytest.mark.parametrize(("layer", "times"), [(nn.ReLU(), 1), (nn.BatchNorm2d(4), 2), (Dropout(0.5), 2)])
def test_a_network_is_traced_once_or_once_in_each_mode_where_they_differ(monkeypatch, layer, times):
    traces = []
    trace = torch.fx.Tracer.trace
    monkeypatch.setattr(torch.fx.Tracer, "trace", lambda *a, **k: (traces.append(1), trace(*a, **k))[1])
    network = FlatModel(nn.Sequential(nn.Conv2d(3, 4, 3, 2), layer, *head(4 * 49))).network.train()
    assert network.chain(X) is not None
    assert network.chain(X[..., :15, :15]) is not None
    assert len(traces) == 1
    assert network.eval().chain(X) is not None
    assert len(traces) == times
    assert "chain" in network.rules
    another = Faster(copy.deepcopy(network.module)).train()  # of the same layers: nothing is left to read
    assert another.chain(X) is not None
    assert len(traces) == times


FORWARDS = {
    "functions": lambda self, x: F.max_pool2d(F.relu(self.conv(x)), 2),
    "other functions": lambda self, x: torch.max_pool2d(self.conv(x).relu_(), 2, stride=[2, 2]),
    "a view": lambda self, x: self.pool(self.relu(self.again(F.relu(self.conv(x))))).view(x.size(0), -1),
    "a shape": lambda self, x: self.block(x).reshape(x.shape[0], -1),
}


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_forward_of_functions_is_read(forward):
    flat = assert_same(Own(FORWARDS[forward]))
    assert list(flat.network.rules) == ["chain"]


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet5", (1, 28, 28)), ("cnn_mnist", (1, 28, 28)), ("mlp3", (1, 16, 16))]
)
def test_our_networks_are_chains(name, shape):
    x = torch.randn(40, *shape, generator=torch.Generator().manual_seed(0))
    assert_same(build(name, 5, shape), x)
    assert_same(build(name, 5, shape), x.clamp_min(0.5))  # as a black border: all values of a window are equal


@pytest.mark.parametrize("network", ["lenet5", "mlp3"])
@pytest.mark.parametrize("head", [partial(OnSimplex, learnt=True), partial(OnSimplex, learnt=False), OnPrototypes])
def test_a_last_layer_of_cosines_ends_a_chain(network, head):
    x = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    made = head(build(network, 5, (1, 28, 28)), 3.0, generator=torch.Generator().manual_seed(0))
    assert_same(made, x)
    before = [p for name, p in made.named_parameters() if not name.startswith("head")]
    with torch.no_grad():  # no feature has a direction then, and all of them have a gradient
        before[-1].fill_(1e-9)
        before[-2].zero_()
    flat = FlatModel(made)
    flat.network.train()
    _, _, expected = by_autograd(flat.module, x)
    flat.differentiate(x, loss)
    assert flat.network.chain(x) is not None
    own = torch.cat([one.expand_as(found).flatten() for one, found in zip(expected, flat._gradients, strict=True)])
    found = torch.cat([one.flatten() for one in flat._gradients])
    assert own.any()
    assert (found - own).norm() <= 5e-6 * own.norm()  # biases' are sums that cancel out


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "3.weight"])
def test_a_frozen_tensor_has_no_gradient_and_the_others_theirs(frozen):
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 196, 5))
    dict(module.named_parameters())[frozen].requires_grad_(False)
    assert_same(module)


@pytest.mark.parametrize(("network", "tied"), [("lenet5", 1), ("cnn_w2", 8)])
def test_a_trajectory_has_the_gradients_of_the_network_at_each_of_its_points(network, tied):
    module = build(network, 5, (3, 28, 28), generator=torch.Generator().manual_seed(0))
    flat = FlatModel(module)
    x = torch.randn(500, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    apart = []

    def gradients(rows):
        flat.network.train()
        _, _, own = by_autograd(flat.module, x[rows])
        flat.differentiate(x[rows], loss)
        return torch.cat([one.reshape(-1) for one in own]), torch.cat([one.reshape(-1) for one in flat._gradients])

    for step in range(50):
        rows = torch.arange(40) + step % 10 * 40
        expected, found = gradients(rows)
        gradient = flat.gradient.clone()
        apart.append(float((found - expected).norm() / expected.norm()))
        if (
            apart[-1] > 1e-3
        ):  # then one sample's alone differs: a tied unit counts on one side (5e-9 into a ReLU: 0.018)
            alone = [(one - other).norm() / expected.norm() / 40 for one, other in map(gradients, rows.split(1))]
            assert sorted(alone)[-2] <= 1e-6 < max(alone)
        flat.vector.sub_(gradient, alpha=0.05)
    # A sample may be nearly tied at some points: where, depends on the number of threads and the processor.
    assert sorted(apart)[-1 - tied] <= 1e-6


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_linear_layer_is_the_same_the_other_way_round(monkeypatch, bias):
    monkeypatch.setattr("fedskew.models._chain._is_intel", lambda: True)
    monkeypatch.setattr("fedskew.models._chain.MANY_WEIGHTS", 768 * 9)
    assert_same(nn.Sequential(nn.Flatten(), nn.Linear(768, 9, bias=bias), nn.ReLU(), nn.Linear(9, 5)), X[:32])


def test_a_diverged_network_gives_nan():
    flat = FlatModel(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), *head(6 * 49)))
    flat.network.train().chain(X)
    flat.vector.fill_(float("nan"))
    value, outputs = flat.differentiate(X, loss)
    assert value.isnan()
    assert outputs.logits.isnan().all()
    assert flat.gradient.isnan().any()


def stepped(self, x):
    self.calls += 1
    return self.block(x) * self.calls


def kept(self, x):
    self.kept.append(x.mean())
    return self.block(x)


def halved(self, x):
    return self.block(x if x.mean() > 0 else -x)


def without_gradient(self, x):
    with torch.no_grad():
        return self.block(x)


def doubled(self, x):
    return self.pool(self.relu(self.again(self.again(self.conv(x)))))


GRADIENTS = "it switches gradients or precision inside"
AS_WRITTEN = {
    "lengths": (lambda self, x: self.lengths(self.relu(self.conv(x))), "LPPool2d is no layer of a chain"),
    "ReLU read twice": (lambda self, x: self.pool(y := self.relu(self.conv(x))) + self.lengths(y), ...),
    "a residual": (lambda self, x: self.pool(F.relu(self.again(y := self.conv(x)) + y)), "it is no chain of layers"),
    "a tensor's data": (lambda self, x: self.block(x).data.flatten(1), "getattr_1 is no layer of a chain"),
    "an argument by name": (lambda self, x: self.relu(input=self.block(x)), "it is no chain of layers"),
    "something between": (lambda self, x: self.pool(self.relu(self.conv(x)) - 0.1), "sub is no layer of a chain"),
    "a layer twice": (doubled, "it uses a layer or a parameter twice"),
    "a window as wide as the image": (lambda self, x: F.max_pool2d(self.conv(x), x.shape[3] // 8), ...),
    "other images": (
        lambda self, x: self.pool(self.again(self.conv(x).reshape(-1, 12, 8, 32))),
        "Conv2d follows what is no image",
    ),
    "control flow": (halved, ...),
    "no gradient": (without_gradient, GRADIENTS),
    "its own gradient": (lambda self, x: Reversed.apply(self.block(x)), GRADIENTS),
    "its own tensor": (lambda self, x: self.block(x) + torch.ones(1), "it makes tensors that depend on no input"),
    "isinstance": (lambda self, x: self.block(x) if isinstance(x, torch.fx.Proxy) else -self.block(x), ...),
    "kept values": (kept, "it changes its own attributes"),
    "counted": (stepped, "it changes its own attributes"),
    "drawn": (lambda self, x: self.block(x) * random.random(), "it draws from a global random generator"),
}


@pytest.mark.parametrize("network", AS_WRITTEN)
def test_a_network_that_is_no_chain_is_computed_as_it_was_written(network):
    forward, why = AS_WRITTEN[network]
    module, state = Own(forward), random.getstate()
    faster = Faster(module)
    assert faster.chain(X) is None
    assert why is ... or faster.rules == {"as_written": why}
    assert (module.calls, module.kept) == (0, [])  # reading leaves nothing behind
    random.setstate(state)
    if network not in ("counted", "drawn", "kept values"):
        with torch.no_grad():
            assert torch.equal(faster(X), module(X))


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([nn.Conv2d(3, 4, 3, padding="same"), *head(1024)], "Conv2d is no layer of a chain"),
        ([nn.Conv2d(3, 4, 3, padding_mode="circular"), *head(784)], "Conv2d is no layer of a chain"),
        ([nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(1), *head(4)], "AdaptiveMaxPool2d is no layer of a chain"),
        ([nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), *head(4 * 196)], "GroupNorm is no layer of a chain"),
        ([nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4, momentum=None), *head(196)], "BatchNorm2d is no layer of a chain"),
        (
            [nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.Linear(196, 4), *head(16)],
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x784 and 196x4)",
        ),
        ([nn.Linear(16, 4), *head(192)], "RuntimeError: mat1 must be a matrix, got 4-D tensor"),
        ([nn.Flatten(), nn.Linear(768, 5), nn.ReLU()], "its logits are not the outputs of a linear layer"),
    ],
)
def test_layers_that_no_chain_has_are_named(layers, why):
    faster = Faster(nn.Sequential(*layers))
    assert faster.chain(X) is None
    assert faster.rules == {"as_written": why}


def test_a_hook_is_called():
    module = Own(lambda self, x: self.block(x))
    network = Faster(module).train()
    assert network.chain(X) is not None
    module.block[1].register_forward_hook(lambda layer, inputs, y: y + 1)
    network.train()
    assert network.chain(X) is None
    with torch.no_grad():
        assert torch.equal(network(X), module(X))


def test_a_branch_on_the_mode_is_read_in_each_mode():
    module = Own(lambda self, x: self.block(x) if self.training else self.lengths(self.conv(x)))
    network = Faster(module)
    for training in (True, False, True):
        module.train(training)
        assert (network.chain(X) is not None) == training
        with torch.no_grad():
            torch.testing.assert_close(network(X), module(X))


def test_a_batch_without_rows_is_computed_as_written():
    network = Faster(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)))
    assert network.chain(X) is not None
    assert network.chain(X[:0]) is None


def test_a_tied_parameter_is_not_taken_for_two_where_its_gradient_begins_at_zero():
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 5)
    )
    assert Faster(copy.deepcopy(module)).chain(X) is not None
    module[4].weight = module[2].weight
    nn.init.zeros_(module[5].weight)
    faster = Faster(module)
    assert faster.chain(X) is None
    assert faster.rules == {"as_written": "it uses a layer or a parameter twice"}


def test_a_loss_may_overwrite_logits_and_features():
    def overwrites(outputs):
        outputs.features.mul_(2)
        outputs.logits.add_(1)
        return loss(outputs)

    def doubles(outputs):
        return loss(Outputs(outputs.features * 2, outputs.logits + 1))

    flat = FlatModel(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), *head(6 * 196)))
    value, _ = flat.differentiate(X, doubles)
    gradient = flat.gradient.clone()
    assert torch.equal(flat.differentiate(X, overwrites)[0], value)
    assert torch.equal(flat.gradient, gradient)
    assert "chain" in flat.network.rules


@pytest.mark.parametrize("again", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network)), None])
def test_a_copy_and_a_network_whose_tensors_move_read_their_own(again):
    network = Faster(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), *head(6 * 196))).eval()
    with torch.no_grad():
        network(X)
        if again is None:
            FlatModel(network.module)
        else:
            network = again(network)
        for parameter in network.parameters():
            parameter.mul_(2)
        network.eval()
        torch.testing.assert_close(network(X), network.module(X))


@pytest.mark.parametrize("at", range(4))
def test_nan_of_one_value_of_a_window_reaches_the_logits(at):
    network = Faster(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), *head(4 * 64))).eval()
    x = X.clone()
    x[7, 0, 4 + at // 2, 6 + at % 2] = float("nan")
    with torch.no_grad():
        assert network.chain(x) is not None
        assert network(x).isnan().any(1).nonzero().tolist() == [[7]]


@pytest.mark.parametrize(("products", "sums"), [(12, 10), (20, 20)])  # for 16 registers, and for 32
def test_convolutions_have_their_gradients_whatever_the_number_of_registers(monkeypatch, products, sums):
    monkeypatch.setattr("fedskew.models._kernels._AT_ONCE", products)
    monkeypatch.setattr("fedskew.models._kernels._SUMS_AT_ONCE", sums)
    monkeypatch.setattr("fedskew.models._convolutions.convolve_of", convolve_of.__wrapped__)
    monkeypatch.setattr("fedskew.models._convolutions.weigh_of", weigh_of.__wrapped__)
    assert_same(nn.Sequential(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), *head(6 * 36)))


def test_kernels_may_use_whole_vectors_and_begin_at_lines_of_the_cache():
    @njit
    def double(values):
        _whole_vectors()
        values *= 2

    values = aligned(3) + np.float32(1)
    double(values)
    assert values.tolist() == [2.0, 2.0, 2.0]
    (compiled,) = double.inspect_llvm().values()
    assert '"prefer-vector-width"="512"' in compiled
    assert not any(aligned(size).ctypes.data % 64 for size in (1, 5, 1000, 10**6))


def test_inputs_with_a_gradient_and_another_default_type_are_computed():
    flat = FlatModel(Dropout.swap(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 5))))
    expected, _ = flat.differentiate(X, loss)
    assert flat.outputs(X.clone().requires_grad_()).logits.requires_grad
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(flat.differentiate(X, loss)[0], expected)
        assert aligned(3).dtype == np.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_networks_of_several_threads_are_read_one_after_another():
    def work(first):
        for width in range(first, first + 10):
            network = Faster(nn.Sequential(nn.Flatten(), nn.Linear(768, width), nn.ReLU(), nn.Linear(width, 5)))
            for _ in range(20):
                network.module(X)
            network.chain(X)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, first) for first in (20, 30, 40, 50)]:
            done.result()


def test_a_network_trains_as_written_where_kernels_cant_be_kept(monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("fedskew.models._convolutions.convolve_of", full)
    faster = Faster(nn.Sequential(nn.Conv2d(3, 4, 3), *head(784)))
    assert faster.chain(X) is None
    assert faster.rules["as_written"].startswith("OSError: No space left on device")


def test_kernels_are_compiled_where_there_is_no_folder_to_keep_them_in():
    code = "import numba.core.caching as c; c.CacheImpl._locator_classes = []; from fedskew.models import _winograd"
    subprocess.run([sys.executable, "-c", f"{code}; assert _winograd.has_kernels()"], check=True)
