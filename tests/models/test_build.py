"""The papers' networks: sizes, raw logits, and weights drawn from the given generator only."""

import math
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedskew.errors import ArgumentError
from fedskew.models import INDEX, Dropout, Network, build, with_features

KNOWN = tomllib.loads(Path(__file__).with_name("networks.toml").read_text(encoding="utf-8"))

SMALL = {
    # in_shape and options that keep the tests of every network short
    **dict.fromkeys(("logistic", "mlp3", "cnn_mnist", "lenet5", "cnn_w2", "resnet32"), ((1, 16, 16), {})),
    **dict.fromkeys(("mobilenetv2", "resnet18"), ((3, 16, 16), {})),
    **dict.fromkeys(("resnet50", "fedla_cifar"), ((3, 32, 32), {})),
    "vgg11": ((3, 32, 32), {"width": 0.25}),
    "table": ((12,), {}),
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
    whole = name == "fasttext"
    return torch.randint(40, shape, generator=generator) if whole else torch.randn(shape, generator=generator)


@pytest.mark.parametrize("size", KNOWN["sizes"], ids=lambda size: " ".join(map(str, size.values())))
def test_parameter_counts_are_the_papers(size):
    expected = size.pop("parameters")
    assert sum(p.numel() for p in build(**size).parameters()) == expected


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
    parameters, buffers = torch.func.stack_module_state(networks)

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
    sizes = [(16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert maps(model, ["conv1", "blocks.4", "blocks.9", "blocks.14"], torch.zeros(1, 3, 32, 32)) == sizes
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


@pytest.mark.parametrize("known", KNOWN["refused"], ids=lambda known: known["says"])
def test_what_can_not_be_built_is_refused_by_name(known):
    says = known.pop("says")
    with pytest.raises(ArgumentError, match=says):
        build(**known)
