"""Frozen parameters and buffers are no part of a model's state; weights from files fit by name and shape."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedskew.errors import ArgumentError, DataError
from fedskew.models import FlatModel
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
    with torch.random.fork_rng(devices=[]):
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
