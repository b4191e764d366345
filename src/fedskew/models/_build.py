"""Networks by name, with weights drawn from a given generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import pydantic
import torch

from fedskew.errors import ArgumentError, nearest
from fedskew.models._cnn_mnist import CNNMnist
from fedskew.models._cnn_w2 import CNNW2
from fedskew.models._dropout import swap_dropout
from fedskew.models._fasttext import FastText
from fedskew.models._fedla_cifar import FedLACifar
from fedskew.models._lenet5 import LeNet5
from fedskew.models._logistic import Logistic
from fedskew.models._mlp3 import MLP3
from fedskew.models._mobilenetv2 import MobileNetV2
from fedskew.models._network import Network
from fedskew.models._resnet import ResNet18, ResNet50
from fedskew.models._resnet32 import ResNet32
from fedskew.models._vgg11 import VGG11

INDEX: dict[str, type[Network]] = {
    "logistic": Logistic,
    "mlp3": MLP3,
    "cnn_mnist": CNNMnist,
    "lenet5": LeNet5,
    "cnn_w2": CNNW2,
    "vgg11": VGG11,
    "mobilenetv2": MobileNetV2,
    "resnet18": ResNet18,
    "resnet32": ResNet32,
    "resnet50": ResNet50,
    "fedla_cifar": FedLACifar,
    "fasttext": FastText,
}
"""The networks by the name that a config gives them."""


def build(
    name: str,
    num_classes: int,
    in_shape: Sequence[int],
    *,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Network:
    """An untrained network for inputs of `in_shape` (without the batch) on the CPU; `options` are the network's own.

    Weights and biases come from PyTorch's default distributions, where the network doesn't name its own, drawn from
    `generator`; without one, from a fresh generator seeded 0. torch's global generator is neither read nor set. Raises
    ArgumentError naming the argument, DataError for a file of weights that can't be read.
    """
    if name not in INDEX:
        raise ArgumentError(f"name: no model is called {name!r}{nearest(name, INDEX)}")
    if num_classes < 1:
        raise ArgumentError(f"num_classes: must be at least 1, got {num_classes}")
    if not in_shape or min(in_shape) < 1:
        raise ArgumentError(f"in_shape: must be positive sizes without the batch, got {tuple(in_shape)}")
    network = INDEX[name]
    given = {option: _checked(network, name, option, value) for option, value in options.items()}
    with torch.device("meta"):  # no storage and no draws: weights are drawn once, below
        model = network(num_classes, tuple(in_shape), **given)
    # `to_empty`, which would import sympy for half a second.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))  # type: ignore[no-untyped-call]
    model.draw(generator or torch.Generator().manual_seed(0))
    swap_dropout(model)
    return model


def note(name: str, options: Mapping[str, Any]) -> str:
    """What a user should know before network `name` with these options is trained; empty where there is nothing.

    A user's own network, `module:attribute`, has none.
    """
    return INDEX[name].note(options) if name in INDEX else ""


def _checked(network: type[Network], name: str, option: str, value: Any) -> Any:
    known = get_type_hints(network.__init__)
    if option not in known:
        raise ArgumentError(f"{option}: model {name!r} has no such option{nearest(option, known)}")
    try:
        return pydantic.TypeAdapter(known[option]).validate_python(value)
    except pydantic.ValidationError as error:
        raise ArgumentError(f"{option}: {error.errors()[0]['msg']} (got {value!r})") from None
