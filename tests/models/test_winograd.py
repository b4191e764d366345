"""Convolutions in tiles are PyTorch's convolutions, to rounding."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common import Residual
from fedskew.models import FlatModel, build
from fedskew.models._chain import Convolution, MaxPooling
from fedskew.models._graph import chain_of
from fedskew.models._wide import ByProducts
from fedskew.models._winograd import _MAPS, _kernel, around_of, gradients, has_kernels

# Whole tiles and others, zeros around or not, batches of several products and of a part of one.
SHAPES = ((21, 10, 17), {}), ((41, 8, 8), {"padding": 1}), ((40, 7, 6), {"padding": (1, 2), "bias": False})


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def layer_of(last: bool, outs: int = 72, **options: object) -> nn.Conv2d:
    layer: nn.Conv2d = nn.Conv2d(48, outs, 3, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for own in layer.parameters():
            own.copy_(drawn(*own.shape))
    return layer.to(memory_format=torch.channels_last if last else torch.contiguous_format)


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("shape", "options"), SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_convolution(shape, options, last):
    layer, x = layer_of(last, **options), drawn(shape[0], 48, *shape[1:]).requires_grad_()
    exact = [own.detach().double().requires_grad_() for own in (x, *layer.parameters())]
    y = functional.conv2d(*exact, padding=layer.padding)
    slope = drawn(*y.shape)
    expected = y, *torch.autograd.grad(y, exact, slope.double())
    assert around_of(x, layer.weight, padding=layer.padding) == tuple(layer.padding)
    with ByProducts():
        ours = layer(x)
    assert ours.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    written = ours, *torch.autograd.grad(ours, (x, *layer.parameters()), slope)
    for own in layer.parameters():
        own.grad = torch.full_like(own, torch.nan)
    stage = Convolution(layer, first=False)
    with torch.no_grad():
        chained = stage.forward(x.detach()), stage.backward(slope), *(own.grad for own in layer.parameters())
    for way in (written, chained):
        for pair in zip(way, expected, strict=True):
            assert_near(*pair)
    assert torch.equal(written[0], chained[0])


def pooling(layer: nn.Conv2d) -> Convolution:
    stage = Convolution(layer, first=False)
    stage.pool = MaxPooling(nn.MaxPool2d(2), first=False)
    return stage


@pytest.mark.parametrize(("shape", "options"), SHAPES, ids=str)
def test_the_largest_of_each_four_values_and_its_gradients_are_those_of_the_layers(shape, options):
    layer, x = layer_of(True, **options), drawn(shape[0], 48, *shape[1:]).requires_grad_()
    exact = [own.detach().double().requires_grad_() for own in (x, *layer.parameters())]
    y = functional.max_pool2d(functional.conv2d(*exact, padding=layer.padding), 2)
    slope = drawn(*y.shape)
    expected = y, *torch.autograd.grad(y, exact, slope.double())
    for own in layer.parameters():
        own.grad = torch.full_like(own, torch.nan)
    stage = pooling(layer)
    for _ in range(2):  # what is kept between is written to
        with torch.no_grad():
            found = stage.forward(x.detach()), stage.backward(slope), *(own.grad for own in layer.parameters())
        assert stage.around is not None
        for pair in zip(found, expected, strict=True):
            assert_near(*pair)


def test_of_equal_values_the_first_is_the_largest_and_missing_ones_are_seen():
    layer, x = layer_of(True, bias=False), torch.zeros(24, 48, 10, 10)
    layer.weight.data.zero_()
    layer.weight.grad = torch.zeros_like(layer.weight)
    stage = pooling(layer)
    with torch.no_grad():
        assert not stage.forward(x).any()
        stage.x = torch.ones(24, 48, 10, 10)  # each place's gradient is 1 for one of four
        stage.backward(torch.ones(24, 72, 4, 4))
        torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, 24 * 16))
        marks = torch.zeros(24, 48, 10, 10)
        marks[:, :, ::2, ::2] = 1  # what the first of four reads with the window's corner
        stage.forward(x)
        stage.x = marks
        stage.backward(torch.ones(24, 72, 4, 4))
        assert torch.allclose(layer.weight.grad[:, :, 0, 0], torch.tensor(24 * 16.0))
        assert torch.allclose(layer.weight.grad[:, :, 0, 1], torch.tensor(0.0), atol=1e-3)
        x[3, 5, 4, 4] = torch.nan
        y = stage.forward(x)
    assert y[3].isnan().any()
    assert not y[[0, 1, 2, 4]].isnan().any()


def test_where_tiles_are_no_gain_pooling_is_a_layer_of_its_own():
    layer, x, slope = layer_of(True), drawn(2, 48, 9, 9), drawn(2, 72, 3, 3)
    layer.weight.grad, layer.bias.grad = (torch.zeros_like(own) for own in layer.parameters())
    pool, conv, whole = MaxPooling(nn.MaxPool2d(2), first=False), Convolution(layer, first=False), pooling(layer)
    with torch.no_grad():
        expected = pool.forward(conv.forward(x)), conv.backward(pool.backward(slope)), layer.weight.grad.clone()
        found = whole.forward(x), whole.backward(slope), layer.weight.grad
    assert whole.around is None
    assert all(map(torch.equal, found, expected))


def test_pooling_behind_a_convolution_is_computed_with_it_once():
    pool = [nn.MaxPool2d(2), nn.MaxPool2d(2)]
    end = nn.Flatten(), nn.Linear(72 * 4, 3)
    for layers in ([nn.ReLU(), *pool], [pool[0], nn.ReLU(), pool[1]]):
        stages = chain_of([nn.Conv2d(48, 72, 3), *layers, *end], (48, 10, 10)).stages
        kinds = [type(stage).__name__ for stage in stages]
        assert kinds == ["Convolution", "MaxPooling", "ReLU", "Flatten", "Linear"]
        assert stages[0].pool is not None
    stages = chain_of([nn.Conv2d(48, 72, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(288, 3)], (48, 8, 8)).stages
    assert stages[0].pool is None


def test_a_first_layers_inputs_get_no_gradient_and_frozen_parameters_stay():
    layer, x = layer_of(True), drawn(40, 48, 10, 10)
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.bias.requires_grad_(False)
    stage = Convolution(layer, first=True)
    with torch.no_grad():
        slope = torch.ones_like(stage.forward(x))
        assert stage.backward(slope) is slope
    assert layer.weight.grad.any()
    assert layer.bias.grad is None


def test_others_stay_pytorchs():
    x, weight = torch.zeros(40, 48, 8, 8), torch.zeros(80, 48, 3, 3)
    assert around_of(x, weight, 1, 1) == (1, 1)
    assert around_of(x[:34], weight, 1, 1) is None  # fewer than 2^20 products
    assert around_of(torch.zeros(7, 512, 8, 8), torch.zeros(512, 512, 3, 3), 1, 1) is None  # 56 tiles
    assert around_of(x, weight, 2, 1) is None
    assert around_of(x, weight, 1, "same") is None
    assert around_of(x, weight, 1, (1,)) is None
    assert around_of(x, weight, 1, 1, 2) is None
    assert around_of(x, weight[:, :24], 1, 1, 1, 2) is None
    assert around_of(x.repeat(2, 1, 1, 1), weight[:63], 1, 1) is None
    assert around_of(x, torch.zeros(80, 48, 3, 1), 1, 1) is None
    assert around_of(x.double(), weight.double(), 1, 1) is None
    assert around_of(torch.zeros(80, 48, 10, 10), weight, 1, 1) is None  # five sixths of each tile
    assert around_of(torch.zeros(80, 48, 1, 1), weight) is None
    assert around_of(torch.zeros(48, 8, 8), weight, 1, 1) is None
    torch.set_num_threads(2)
    assert around_of(x, weight, 1, 1) is None


WRONG = (drawn(1), {}), (drawn(72).double(), {}), (drawn(1, 72), {}), (None, {"padding": -1})


@pytest.mark.parametrize(("bias", "options"), WRONG, ids=("length", "type", "shape", "padding"))
def test_what_is_wrong_is_said_by_pytorch(bias, options):
    x, weight = drawn(40, 48, 12, 12), drawn(72, 48, 3, 3)
    with pytest.raises(RuntimeError) as expected:
        functional.conv2d(x, weight, bias, **options)
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"), ByProducts():
        functional.conv2d(x, weight, bias, **options)


def test_infinite_and_missing_values_are_seen():
    layer, x = layer_of(True, padding=1), drawn(40, 48, 8, 8)
    x[3, 5, 2, 2] = torch.nan
    with torch.no_grad(), ByProducts():
        y = layer(x)
    assert y[3].isnan().any()
    assert torch.isfinite(y[[0, 1, 2, 4]]).all()


def test_gradients_of_gradients_are_pytorchs():
    layer, x = layer_of(True, padding=1), drawn(40, 48, 8, 8).requires_grad_()

    def curved() -> torch.Tensor:
        (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return torch.cat([one.flatten() for one in torch.autograd.grad(slope.square().sum(), (x, layer.weight))])

    expected = curved()
    with ByProducts():
        found = curved()
    assert_near(found, expected.double())


def forward(layer, x, slope):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(layer(torch.autograd.forward_ad.make_dual(x, x))).tangent


def traced(layer, x, slope):
    weight = layer.weight.detach()
    return torch.jit.trace(lambda one: functional.conv2d(one, weight, padding=1), (x,))(2 * x)


def written_out(layer, x, slope):
    return make_fx(lambda one: functional.conv2d(one, layer.weight, padding=1))(x)(2 * x)


def several_slopes(layer, x, slope):
    slopes = torch.stack([slope, 2 * slope])
    return torch.autograd.grad(layer(x), layer.weight, slopes, is_grads_batched=True)[0]


def mapped_slopes(layer, x, slope):
    y = layer(x)
    return torch.vmap(lambda one: torch.autograd.grad(y, layer.weight, one)[0])(torch.stack([slope, 2 * slope]))


def backward_in_autocast(layer, x, slope):
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(y, layer.weight, slope)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "way",
    [forward, traced, written_out, several_slopes, mapped_slopes, backward_in_autocast],
    ids=lambda way: way.__name__,
)
def test_what_pytorch_derives_otherwise_is_the_same(way):
    layer, x = layer_of(True, padding=1), drawn(40, 48, 8, 8)
    own = layer, x, drawn(40, 72, 8, 8)
    expected = way(*own)
    with ByProducts():
        assert_near(way(*own), expected.double())


def test_what_is_not_wanted_is_not_computed(monkeypatch):
    computed = []
    monkeypatch.setattr("fedskew.models._winograd._kernel", lambda maps, channels: lambda *_: computed.append(maps))
    layer = layer_of(True, padding=1).requires_grad_(False)
    x = drawn(12, 48, 8, 8)
    gradients(drawn(12, 72, 8, 8), x, layer.weight, (1, 1), (True, False, False))
    assert computed == ["slopes", "input_slopes"]
    computed.clear()
    gradients(drawn(12, 72, 8, 8), x, layer.weight, (1, 1), (False, True, False))
    assert computed == ["slopes", "inputs"]


def test_a_kernel_of_other_maps_has_another_name(monkeypatch):
    one = _kernel.__wrapped__("values", 48)
    monkeypatch.setitem(
        _MAPS, "values", tuple([[2 * factor for factor in row] for row in own] for own in _MAPS["values"])
    )
    assert _kernel.__wrapped__("values", 48).__name__ != one.__name__


def test_where_numba_can_not_compile_networks_are_pytorchs(monkeypatch):
    def fails(*_):
        raise NotImplementedError

    has_kernels.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("fedskew.models._kernels.compiled", fails)
        assert around_of(torch.zeros(40, 48, 8, 8), torch.zeros(80, 48, 3, 3), 1, 1) is None
    has_kernels.cache_clear()


def mapped(layer, x):
    return torch.vmap(lambda one: functional.conv2d(one[None], layer.weight, layer.bias, padding=1)[0])(x)


def differentiated(layer, x):
    return torch.func.vjp(lambda one: functional.conv2d(one, layer.weight, layer.bias, padding=1), x)[0]


def in_bfloat16(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


WAYS = (partial(checkpoint, use_reentrant=False), mapped, differentiated, in_bfloat16)


@pytest.mark.parametrize("way", WAYS, ids=("checkpoint", "vmap", "vjp", "autocast"))
def test_layers_that_are_used_otherwise_are_trained(way):
    gradients = []
    for one in (way, lambda layer, x: layer(x)):
        network = Residual(64, one)
        with torch.no_grad():
            for own in network.parameters():
                own.copy_(drawn(*own.shape))
        model = FlatModel(network)
        model.network.train()
        model.differentiate(drawn(32, 64, 8, 8), lambda outputs: outputs.logits.square().sum())
        gradients.append(model.views(model.gradient)["convolution.weight"])
    limit = 3e-2 if way is in_bfloat16 else 1e-5
    assert torch.allclose(*gradients, rtol=0, atol=limit * float(gradients[1].abs().max()))


def test_networks_are_computed_in_tiles_as_chains_and_as_written():
    for network, way in ((build("cnn_w2", 10, (3, 32, 32)), "chain"), (Residual(64), "as_written")):
        model = FlatModel(network)
        model.network.train()
        shape = (10, 3, 32, 32) if way == "chain" else (32, 64, 8, 8)
        with torch.profiler.profile() as profile:
            model.differentiate(drawn(*shape), lambda outputs: outputs.logits.square().sum())
        assert way in model.network.rules
        assert "aten::bmm" in {event.name for event in profile.events()}
