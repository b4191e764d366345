"""A frozen body and the rest: where networks are cut, and that both parts are the network."""

import pickle

import pytest
import torch
from torch import Tensor, nn

from fedskew.models import Dropout, FlatModel, build
from fedskew.models._graph import UnreadableError
from fedskew.models.body import cut

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
