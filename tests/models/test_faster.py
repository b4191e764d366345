"""A rewritten network is the same function: its values, gradients and buffers held against the network as it was."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedskew.models import Dropout, Faster, FlatModel, build, with_features

X = torch.randn(40, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SWAPPED, JOINED = "relu_after_pooling", "convolution_with_pooling"


def head(channels: int, side: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(channels * side * side, 5)]


class Own(nn.Module):
    """A network of a user's own, with a `forward` of the test's."""

    def __init__(self, forward, channels=12):
        super().__init__()
        self.conv, self.again = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.relu, self.pool, self.average = nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2)
        self.block = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(channels * 64, 5)
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


def outputs(network: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Logits, gradients of all parameters, and buffers after one pass."""
    y = network(X)
    loss = F.cross_entropy(y, torch.arange(40) % 5)
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    zeros = [torch.zeros(()) if gradient is None else gradient for gradient in gradients]
    return [y, *zeros, *(buffer.clone() for buffer in module.buffers())]


def assert_same(module: nn.Module, said: dict, bits: bool = True) -> None:
    """In both modes, and with features; `bits`: to the bit."""
    torch.manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    for training in (True, False, True):
        plain = copy.deepcopy(module).train(training)
        flat = FlatModel(copy.deepcopy(module).train(training), channels_last=False)
        expected, got = outputs(plain, plain), outputs(flat.network, flat.module)
        assert list(flat.network.program(X).rules) == list(said), flat.network.program(X).rules
        assert all(flat.network.program(X).rules[key] == value for key, value in said.items() if value is not ...)
        for one, other in zip(expected, got, strict=True):
            if bits:
                assert torch.equal(one, other)
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
        read = with_features(flat.network)(X)
        torch.testing.assert_close(read.features, with_features(plain)(X).features, rtol=1e-4, atol=1e-5)
        assert list(flat.module.state_dict()) == list(module.state_dict())


SAME_BITS = {
    "a sequence": (lambda: nn.Sequential(nn.Conv2d(3, 12, 5), nn.ReLU(), nn.MaxPool2d(2), *head(12, 6)), 1, 1),
    "in place": (lambda: nn.Sequential(nn.Conv2d(3, 12, 5), nn.ReLU(True), nn.MaxPool2d(2), *head(12, 6)), 1, 1),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), *head(4, 6)), 1, 0,
    ),
    "no bias": (lambda: nn.Sequential(nn.Conv2d(3, 4, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2), *head(4, 6)), 1, 0),
    "a stride": (lambda: nn.Sequential(nn.Conv2d(3, 4, 4, 2), nn.ReLU(), nn.MaxPool2d(2), *head(4, 3)), 1, 0),
    "overlapping": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *head(4, 6)), 1, 0,
    ),
    "rounded up": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 4), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), *head(4, 7)), 1, 0,
    ),
    "dropout": (
        lambda: Dropout.swap(
            nn.Sequential(
                nn.Conv2d(3, 12, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.5),
                nn.Linear(432, 5),
            )
        ), 1, 1,
    ),
    "functions": (lambda: Own(lambda self, x: F.max_pool2d(F.relu(self.conv(x)), 2)), 1, 1),
    "other functions": (lambda: Own(lambda self, x: torch.max_pool2d(self.conv(x).relu_(), 2, stride=[2, 2])), 1, 1),
    "pooled first": (lambda: Own(lambda self, x: F.relu(F.max_pool2d(self.conv(x), kernel_size=2))), 0, 1),
    "residual": (lambda: Own(lambda self, x: self.pool(F.relu(self.again(y := self.conv(x)) + y))), 1, 0),
    "two blocks": (
        lambda: Own(lambda self, x: self.block(x) + self.pool(self.relu(self.again(self.relu(self.conv(x)))))), 2, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("network", SAME_BITS)
def test_a_rewritten_network_has_the_same_bits(network):
    make, swapped, joined = SAME_BITS[network]
    assert_same(make(), {name: times for name, times in ((SWAPPED, swapped), (JOINED, joined)) if times})


def lenet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        *head(16, 3), nn.ReLU(), nn.Linear(5, 5),
    )  # fmt: skip


@pytest.mark.slow
def test_few_channels_differ_by_rounding_only():
    assert_same(lenet(), {SWAPPED: 2, JOINED: 2}, bits=False)
    shared = Own(lambda self, x: self.block(x) + self.block(x.flip(3)), channels=6)
    assert_same(shared, {SWAPPED: 2, JOINED: 2}, bits=False)
    assert_same(build("lenet5", 5, (3, 16, 16)), {JOINED: 2}, bits=False)


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


def counted(self, x):
    self.seen = self.seen + 1
    return self.block(x)


OTHER_VALUES = "its graph gives other values than its forward()"
GRADIENTS = "it switches gradients or precision inside"
AS_WRITTEN = {
    "average": (lambda self, x: self.average(self.relu(self.conv(x))), "no rule applies"),
    "ReLU read twice": (lambda self, x: self.pool(y := self.relu(self.conv(x))) + self.average(y), "no rule applies"),
    "convolution read twice": (
        lambda self, x: self.pool(self.relu(y := self.conv(x))) + self.average(y), "no rule applies",
    ),
    "something between": (lambda self, x: self.pool(self.relu(self.conv(x)) - 0.1), "no rule applies"),
    "written in place": (lambda self, x: self.pool(F.relu(y := self.conv(x), inplace=True)) + self.average(y),
                         "no rule applies"),
    "control flow": (halved, ...),
    "no gradient": (without_gradient, GRADIENTS),
    "its own gradient": (lambda self, x: Reversed.apply(self.block(x)), GRADIENTS),
    "its own tensor": (lambda self, x: self.block(x) + torch.ones(1), "it makes tensors that depend on no input"),
    "isinstance": (lambda self, x: self.block(x) * isinstance(x, torch.fx.Proxy),
                   OTHER_VALUES),
    "kept values": (kept, "it changes its own attributes"),
}  # fmt: skip


@pytest.mark.parametrize("network", AS_WRITTEN)
def test_a_network_whose_graph_is_not_sure_is_computed_as_it_was_written(network):
    forward, why = AS_WRITTEN[network]
    said = {"as_written": why}
    module = Own(forward)
    if network == "kept values":
        assert Faster(module).program(X).rules == said
        assert module.kept == []  # reading leaves nothing behind
    elif network in ("no gradient", "its own gradient", "isinstance"):
        assert Faster(module).program(X).rules == said
        torch.testing.assert_close(outputs(Faster(module), module), outputs(module, module), rtol=0, atol=0)
    else:
        assert_same(module, said)


def test_a_network_that_counts_or_draws_in_python_is_computed_as_it_was_written():
    module = Own(stepped)
    network = Faster(module)
    assert network.program(X).rules == {"as_written": "it changes its own attributes"}
    first, second = network(X[:2]), network(X[:2])
    assert module.calls == 2
    torch.testing.assert_close(second - module.head.bias, 2 * (first - module.head.bias))
    drawing = Faster(Own(lambda self, x: self.block(x) * random.random()))
    state = random.getstate()
    assert drawing.program(X).rules == {"as_written": "it draws from a global random generator"}
    random.setstate(state)


def test_a_block_with_a_hook_keeps_it():
    module = Own(lambda self, x: self.block(x))
    module.block.register_forward_hook(lambda layer, inputs, y: 2 * y)
    assert_same(module, {"as_written": "'block' has hooks"})
    module = Own(lambda self, x: self.block(x))
    module.block[1].register_forward_hook(lambda layer, inputs, y: y + 1)
    assert_same(module, {"as_written": "no rule applies"})


def test_a_branch_on_the_mode_is_read_in_each_mode():
    module = Own(lambda self, x: self.block(x) if self.training else self.average(self.conv(x)))
    network = Faster(module)
    for training, said in ((True, {SWAPPED: 1, JOINED: 1}), (False, {"as_written": "no rule applies"})):
        module.train(training)
        assert network.program(X).rules == said
        assert torch.equal(network(X), module(X))


def test_dropout_of_a_part_that_is_used_twice_is_numbered_as_before():
    part = Dropout.swap(nn.Sequential(nn.Conv2d(3, 12, 3), nn.Dropout(0.5), nn.ReLU(), nn.MaxPool2d(2)))
    module = nn.Sequential(part, nn.Flatten(), nn.Linear(12 * 49, 5))
    network = Faster(module)
    assert torch.equal(network(X), network(X))
    assert torch.equal(network(X), module(X))
    assert isinstance(part[1], Dropout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "cnn_mnist"])
def test_our_networks_are_read(name):
    module = build(name, 5, (3, 32, 32)).eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    network = Faster(module)
    assert torch.equal(network(x), module(x))
    assert network.program(x).rules.get("as_written", "no rule applies") == "no rule applies"
