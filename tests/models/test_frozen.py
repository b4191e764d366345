"""Frozen parameters and buffers are no part of a model's state; weights from files fit by name and shape."""

import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedskew.errors import ArgumentError, DataError
from fedskew.models import Dropout, FlatModel, build
from fedskew.models._graph import UnreadableError
from fedskew.models.body import cut
from fedskew.models.frozen import freeze
from fedskew.models.weights import load_weights


class Net(nn.Module):
    """Two batch norms, one without parameters of its own, and a table of positions."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.BatchNorm1d(5, affine=False))
        self.neck = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.fc = nn.Linear(6, classes)
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.neck(self.body(x)) + self.table)


def net(classes: int = 3, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(classes)


X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def trained(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("frozen", "kept", "left"),
    [
        (["body.*", "neck.0.*"], None, {"neck.1.weight", "neck.1.bias", "fc.weight", "fc.bias"}),
        (["body", "neck"], None, {"fc.weight", "fc.bias"}),  # a layer's name stands for all below it
        (None, ["*.bias"], {"body.0.bias", "body.1.bias", "neck.0.bias", "neck.1.bias", "fc.bias"}),
        (None, ["fc.weight", "neck.1"], {"fc.weight", "neck.1.weight", "neck.1.bias"}),
    ],
)
def test_patterns_say_what_is_frozen_or_what_is_trained(frozen, kept, left):
    module = net()
    freeze(module, frozen, kept)
    assert trained(module) == left


@pytest.mark.parametrize(
    ("frozen", "kept", "message"),
    [
        (["bodi.*"], None, r"freeze: no parameter of the network is called 'bodi\.\*' \(did you mean 'body\.\*'\?\)"),
        (None, ["fc.wieght"], r"train: no parameter .* 'fc.wieght' \(did you mean 'fc.weight'\?\)"),
        (["zzz"], None, r"freeze: .* \(known: body, body.0, body.1, fc, neck, neck.0, neck.1\)"),
        (["*"], None, "freeze: nothing is left to train"),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest_name(frozen, kept, message):
    with pytest.raises(ArgumentError, match=message):
        freeze(net(), frozen, kept)


def test_the_state_is_what_trains_and_a_frozen_batch_norm_is_in_eval_mode():
    module = net()
    freeze(module, ["body"], None)
    model = FlatModel.of(module, X)
    assert model.names == ("neck.0.weight", "neck.0.bias", "neck.1.weight", "neck.1.bias", "fc.weight", "fc.bias")
    sizes = [len(part) for part in model.read_state()]
    assert sizes == [5 * 6 + 6 + 6 + 6 + 6 * 3 + 3, 6 + 6, 1]  # of buffers those of one batch norm, and its counter
    assert set(model.frozen()) == {name for name in module.state_dict() if name.startswith("body.")} | {"table"}
    before = {name: value.clone() for name, value in model.frozen().items()}
    expected = net()
    expected.body.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected.train()
    expected.body.eval()
    model.network.train()
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(expected(X), Y).backward()
        optimizer.step()
        model.differentiate(X, lambda outputs: nn.functional.cross_entropy(outputs.logits, Y))
        model.write(model.vector - 0.1 * model.gradient)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(model.frozen()[name], value) for name, value in before.items())
    assert model.copy().buffer_names == model.buffer_names


def test_a_file_s_last_layer_may_have_another_name_and_other_classes(tmp_path):
    other = net(seed=7)
    state = {name.replace("fc.", "head."): value for name, value in other.state_dict().items()}
    path = tmp_path / "body.safetensors"
    save_file(state, path)
    module = net()
    assert load_weights(module, path, X) == []
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in module.state_dict().items())
    wider, drawn = net(4), net(4)
    assert load_weights(wider, path, X) == ["fc"]
    for name, value in wider.state_dict().items():
        assert torch.equal(value, (drawn if name.startswith("fc.") else other).state_dict()[name])
    save_file({name: value for name, value in state.items() if not name.startswith("head.")}, path)
    assert load_weights(net(), path, X) == ["fc"]


def test_a_file_of_another_network_is_refused_by_name(tmp_path):
    state = net().state_dict()
    path = tmp_path / "w.safetensors"
    lacking = {name: value for name, value in state.items() if not name.startswith("neck.0")}
    for held, message in (
        (lacking, "weights: .*w.safetensors is of another network: it lacks 'neck.0.bias' and 1 more, of the network"),
        (state | {"more": torch.ones(1)}, "it has 'more', which the network has not"),
        (state | {"body.0.weight": torch.ones(5, 3)}, r"'body.0.weight' is \(5, 3\) there and \(5, 4\) in the network"),
    ):
        save_file(held, path)
        with pytest.raises(ArgumentError, match=message):
            load_weights(net(), path, X)
    with pytest.raises(DataError, match="no such weights file"):
        load_weights(net(), tmp_path / "none.safetensors", X)


# A frozen body and the rest: where networks are cut, and that both parts are the network.


SAMPLES = torch.linspace(-1, 1, 4 * 3 * 32 * 32).view(4, 3, 32, 32)


def frozen(name: str, *trained: str) -> nn.Module:
    """A network that trains but the parameters with some beginnings; its frozen batch norm is in eval mode."""
    torch.manual_seed(0)
    module = Dropout.swap(build(name, num_classes=7, in_shape=(3, 32, 32)))
    for parameter, values in module.named_parameters():
        values.requires_grad_(parameter.startswith(trained))
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d) and not layer.weight.requires_grad:
            layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign]
            layer.training = False
    return module


@pytest.mark.parametrize(
    ("name", "trained", "shape"),
    [
        ("lenet5", ("head",), (84,)),
        ("lenet5", ("fc2", "head"), (120,)),
        ("resnet18", ("head",), (512,)),
        ("resnet18", ("layer4", "head"), (256, 2, 2)),
        ("cnn_w2", ("head",), (64, 14, 14)),  # before its first dropout, which draws in training
    ],
)
def test_both_parts_compute_what_the_network_does(name: str, trained: tuple[str, ...], shape: tuple[int, ...]) -> None:
    module = frozen(name, *trained)
    expected = module.eval()(SAMPLES)
    body, rest = cut(module, SAMPLES)
    features = body(SAMPLES)
    assert features.shape[1:] == shape
    assert torch.equal(rest.eval()(features), expected)
    assert torch.equal(pickle.loads(pickle.dumps(rest))(features), expected)


def test_the_rest_trains_the_layers_of_the_network() -> None:
    module = frozen("lenet5", "fc2", "head")
    _, rest = cut(module, SAMPLES)
    whole, part = FlatModel(module).names, FlatModel(rest)
    assert part.names == whole == ("fc2.weight", "fc2.bias", "head.weight", "head.bias")
    part.write(torch.zeros_like(part.vector))
    assert not module.head.weight.any()


def test_dropout_of_the_rest_has_the_same_masks_in_every_pass() -> None:
    body, rest = cut(frozen("cnn_w2", "head"), SAMPLES)
    features = body(SAMPLES)
    assert torch.equal(rest.train()(features), rest(features))
    assert not torch.equal(rest(features), rest.eval()(features))


class Branches(nn.Module):
    """The input goes around its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) + self.head(x).sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("module", "frozen_names", "reason"),
    [
        (Branches(), [], "no layer is frozen"),
        (Branches(), ["head"], "no frozen layer comes before"),
        (Branches(), ["first"], "no frozen layer comes"),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)), ["2"], "no frozen layer"),
    ],
)
def test_what_has_no_body_is_not_cut(module: nn.Module, frozen_names: list[str], reason: str) -> None:
    for name in frozen_names:
        module.get_submodule(name).requires_grad_(False)
    with pytest.raises(UnreadableError, match=reason):
        cut(module, torch.ones(2, 4))
