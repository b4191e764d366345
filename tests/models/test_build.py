"""The papers' networks: sizes, raw logits, and weights drawn from the given generator only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedskew.errors import ArgumentError
from fedskew.models import INDEX, Dropout, Network, build, with_features

SIZES = [
    # name, classes, input, parameters as in the papers or counted by hand, options
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
    ("vgg11", 10, (3, 32, 32), 9_750_922),
    ("mobilenetv2", 10, (3, 32, 32), 2_296_922),
    ("mobilenetv2", 100, (3, 32, 32), 2_412_212),
    ("mobilenetv2", 200, (3, 64, 64), 2_540_312),
    ("resnet18", 10, (3, 32, 32), 11_181_642),
    ("resnet18", 10, (3, 32, 32), 11_173_962, {"stem": "cifar"}),
    ("resnet32", 10, (3, 32, 32), 464_154),
    ("resnet50", 7, (3, 64, 64), 23_522_375),
    ("fedla_cifar", 100, (3, 32, 32), 30_441_528),
    ("fasttext", 4, (200,), 3_157_508),
]

SMALL = {
    # in_shape and options that keep the tests of every network short
    **dict.fromkeys(("logistic", "mlp3", "cnn_mnist", "lenet5", "cnn_w2", "resnet32"), ((1, 16, 16), {})),
    **dict.fromkeys(("mobilenetv2", "resnet18"), ((3, 16, 16), {})),
    **dict.fromkeys(("resnet50", "fedla_cifar"), ((3, 32, 32), {})),
    "vgg11": ((3, 32, 32), {"width": 0.25}),
    "fasttext": ((12,), {"vocabulary": 40, "dim": 8}),
}

BY_SIZE = [  # those of 23 and 30 million parameters: make test-all
    pytest.param(name, marks=pytest.mark.whole_product) if name in ("resnet50", "fedla_cifar") else name
    for name in sorted(INDEX)
]


def small(name: str, classes: int = 3, seed: int = 0) -> Network:
    in_shape, options = SMALL[name]
    return build(name, classes, in_shape, generator=torch.Generator().manual_seed(seed), **options).eval()


def inputs(name: str, *batch: int) -> torch.Tensor:
    generator, shape = torch.Generator().manual_seed(0), (*batch, *SMALL[name][0])
    return (
        torch.randint(40, shape, generator=generator) if name == "fasttext" else torch.randn(shape, generator=generator)
    )


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_the_papers(size):
    name, classes, in_shape, parameters, *options = size
    assert sum(p.numel() for p in build(name, classes, in_shape, **dict(*options)).parameters()) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(INDEX))
def test_logits_are_raw_the_linear_head_on_the_features(name):
    model, x = small(name), inputs(name, 2)
    features, logits = with_features(model)(x)
    assert features.shape == (2, model.head.in_features)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(features, model.features(x))
    torch.testing.assert_close(logits, features @ model.head.weight.T + model.head.bias, rtol=1e-4, atol=1e-4)


def test_pooling_before_relu_is_lenet5_as_printed():
    model = build("lenet5", 10, (3, 32, 32))
    printed = nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        model.fc1, nn.ReLU(), model.fc2, nn.ReLU(), model.head,
    )  # fmt: skip
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), printed(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_SIZE)
def test_torchs_global_generator_is_neither_read_nor_set(name):
    before = torch.get_rng_state()
    first = small(name, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(7)
    again = small(name, seed=3)
    other = small(name, seed=4)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    assert not torch.equal(first.head.weight, other.head.weight)
    if name == "logistic":  # without a generator the weights are always the same
        assert torch.equal(*(build(name, 3, (4,)).head.weight for _ in range(2)))


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


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_SIZE)
def test_logits_and_gradients_map_over_stacked_parameters(name):
    networks = [small(name, seed=seed) for seed in (0, 1)]
    x, y = inputs(name, 2, 2), torch.tensor([[0, 2], [1, 1]])
    parameters = stacked(dict(network.named_parameters()) for network in networks)
    buffers = stacked(dict(network.named_buffers()) for network in networks)

    def loss(parameters, buffers, x, y):
        logits = torch.func.functional_call(networks[0], (parameters, buffers), (x,))
        return cross_entropy(logits, y), logits

    gradients, logits = torch.func.vmap(torch.func.grad(loss, has_aux=True))(parameters, buffers, x, y)
    for place, network in enumerate(networks):
        alone = network(x[place])
        torch.testing.assert_close(logits[place], alone, rtol=1e-4, atol=1e-5)
        cross_entropy(alone, y[place]).backward()
        for key, parameter in network.named_parameters():
            excess = (gradients[key][place] - parameter.grad).abs_() - 1e-3 * parameter.grad.abs()
            assert excess.max() <= 1e-4 * parameter.grad.abs().max(), key


def stacked(states) -> dict[str, torch.Tensor]:
    first, *others = states
    return {key: torch.stack([value, *(other[key] for other in others)]).detach() for key, value in first.items()}


def maps(model: nn.Module, layers: list[str], x: torch.Tensor) -> list[tuple[int, ...]]:
    """Channels, height and width that come out of each of these layers."""
    shapes = []
    for name in layers:
        model.get_submodule(name).register_forward_hook(lambda *call: shapes.append(tuple(call[2].shape[1:])))
    model.eval()(x)
    return shapes


def test_mobilenetv2_ends_at_an_eighth_of_the_side_and_pools_any_size():
    # 32 x 32: stride 1 in the stem and in the stages of 16 and 24 channels, then 2, 2, 1, 2, 1.
    ends = ["conv1", *(f"blocks.{place}" for place in (0, 2, 5, 9, 12, 15, 16)), "conv2"]
    shapes = [(32, 32), (16, 32), (24, 32), (32, 16), (64, 8), (96, 8), (160, 4), (320, 4), (1280, 4)]
    model = build("mobilenetv2", 10, (3, 32, 32))
    assert maps(model, ends, torch.zeros(1, 3, 32, 32)) == [(channels, side, side) for channels, side in shapes]
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_mobilenetv2_adds_the_input_wherever_the_size_stays():
    blocks = build("mobilenetv2", 10, (3, 32, 32)).blocks
    kinds = {None: "none", nn.Identity: "input", nn.Sequential: "projection"}
    found = [kinds[type(block.shortcut) if block.shortcut is not None else None] for block in blocks]
    rows = [
        ["projection"], ["projection", "input"], ["none", "input", "input"], ["none", "input", "input", "input"],
        ["projection", "input", "input"], ["none", "input", "input"], ["projection"],
    ]  # fmt: skip
    assert found == [kind for row in rows for kind in row]


@pytest.mark.parametrize(("stem", "sides"), [("imagenet", (16, 8, 4, 2, 1)), ("cifar", (32, 32, 16, 8, 4))])
def test_the_stem_of_resnet18_decides_the_sizes_that_follow(stem, sides):
    model = build("resnet18", 10, (3, 32, 32), stem=stem)
    shapes = [(channels, side, side) for channels, side in zip((64, 64, 128, 256, 512), sides, strict=True)]
    assert maps(model, ["conv1", "layer1", "layer2", "layer3", "layer4"], torch.zeros(1, 3, 32, 32)) == shapes


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet18", "resnet32", "fedla_cifar"])
def test_batch_norm_starts_as_the_identity_up_to_its_eps(name):
    layers = [layer for layer in small(name).modules() if isinstance(layer, nn.BatchNorm2d)]
    values = [{key: value.unique().tolist() for key, value in layer.state_dict().items()} for layer in layers]
    start = {"weight": [1], "bias": [0], "running_mean": [0], "running_var": [1], "num_batches_tracked": [0]}
    assert values == [start] * len(layers) != []


def test_resnet32_pads_its_shortcut_with_channels_of_zeros():
    model = build("resnet32", 10, (3, 32, 32))
    assert maps(model, ["conv1", "blocks.4", "blocks.9", "blocks.14"], torch.zeros(1, 3, 32, 32)) == [
        (16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8),
    ]  # fmt: skip
    block = model.blocks[5].eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 6, 6, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(2, 32, 3, 3)
    padded[:, 8:24] = x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x), padded)


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_vgg11_is_configuration_a(width):
    model = build("vgg11", 10, (3, 32, 32), width=width)
    a = [nn.Conv2d, nn.MaxPool2d, nn.ReLU] * 2 + [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.MaxPool2d, nn.ReLU] * 3
    assert [type(layer) for layer in model.convolutions] == a
    channels = [layer.out_channels for layer in model.convolutions if isinstance(layer, nn.Conv2d)]
    assert channels == [int(width * size) for size in (64, 128, 256, 256, 512, 512, 512, 512)]
    assert (model.fc1.out_features, model.fc2.out_features) == (int(512 * width), int(512 * width))
    assert [layer.p for layer in model.modules() if isinstance(layer, Dropout)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "layer", "variance"),
    [
        # 2 / (9 * channels out), 2 / (9 * channels in), 2 / inputs of the head
        ("vgg11", "convolutions.3", 2 / (9 * 32)),
        ("resnet18", "layer2.0.conv1", 2 / (9 * 128)),
        ("resnet32", "blocks.10.conv1", 2 / (9 * 32)),
        ("resnet32", "head", 2 / 64),
    ],
)
def test_weights_drawn_after_he(name, layer, variance):
    layer = small(name, classes=40).get_submodule(layer)
    values = layer.weight.detach()
    assert float(values.mean()) == pytest.approx(0.0, abs=4 * math.sqrt(variance / values.numel()))
    assert float(values.var()) == pytest.approx(variance, rel=6 / math.sqrt(values.numel()))
    assert float(values.abs().max()) > 2.5 * math.sqrt(variance)  # a normal, not a uniform
    if name == "vgg11":
        assert not layer.bias.any()


def test_padding_is_left_out_of_a_texts_mean():
    model = build("fasttext", 4, (5,), vocabulary=10, dim=3)
    words = model.embedding.weight
    x = torch.tensor([[7, 2, 0, 0, 0], [0, 7, 0, 2, 0], [9, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    mean = torch.stack([(words[7] + words[2]) / 2, (words[7] + words[2]) / 2, words[9], torch.zeros(3)])
    torch.testing.assert_close(model.features(x), model.fc1(mean))
    model(x).sum().backward()
    assert not words.grad[0].any()


def test_a_token_beyond_the_vocabulary_is_the_unknown_word():
    model = build("fasttext", 4, (3,), vocabulary=10, dim=3)
    assert torch.equal(model(torch.tensor([[2, 10, 99]])), model(torch.tensor([[2, 1, 1]])))


@pytest.mark.parametrize(
    ("name", "classes", "in_shape", "options", "message"),
    [
        ("lenet", 10, (3, 32, 32), {}, "did you mean 'lenet5'"),
        ("lenet5", 10, (1, 8, 8), {}, "in_shape: lenet5 takes images.* at least 16 x 16"),
        ("cnn_mnist", 10, (64,), {}, "in_shape: cnn_mnist takes images"),
        ("cnn_w2", 10, (3, 5, 32), {}, "at least 6 x 6"),
        ("vgg11", 10, (3, 28, 28), {}, "vgg11 takes images.* at least 32 x 32"),
        ("fasttext", 10, (3, 32, 32), {}, "in_shape: fasttext takes texts"),
        ("logistic", 0, (4,), {}, "num_classes"),
        ("logistic", 3, (), {}, "in_shape"),
        ("logistic", 3, (0, 4), {}, "in_shape"),
        ("lenet5", 10, (3, 32, 32), {"width": 2}, "width: model 'lenet5' has no such option"),
        ("mlp3", 10, (4,), {"width": "wide"}, r"width: Input should be a valid integer.* \(got 'wide'\)"),
        ("resnet18", 10, (3, 32, 32), {"stem": "small"}, "stem: Input should be 'imagenet' or 'cifar'"),
        ("vgg11", 10, (3, 32, 32), {"width": 0.0}, "width: must be above 0"),
        ("fasttext", 10, (200,), {"vocabulary": 0}, "vocabulary: must be at least 2"),
    ],
)
def test_what_can_not_be_built_is_refused_by_name(name, classes, in_shape, options, message):
    with pytest.raises(ArgumentError, match=message):
        build(name, classes, in_shape, **options)
