"""Networks by name, with weights drawn from a given generator."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.errors import ArgumentError, in_one_line, nearest
from fedskew.models._dropout import Dropout
from fedskew.models._network import Network
from fedskew.models._networks import CNNW2, MLP3, VGG11, CNNMnist, FastText, FedLACifar, LeNet5, Logistic, TableNet
from fedskew.models._residual import MobileNetV2, ResNet18, ResNet32, ResNet50
from fedskew.parameters import checked_options

INDEX: dict[str, type[Network]] = {
    "logistic": Logistic,
    "mlp3": MLP3,
    "table": TableNet,
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
"""Network classes by their name in a config."""


def build(
    name: str, num_classes: int, in_shape: Sequence[int], *, generator: torch.Generator | None = None, **options: Any
) -> Network:
    """Build an untrained network on the CPU.

    Weights and biases are drawn from PyTorch's default distributions, unless the network defines others. PyTorch's
    global generator is neither read nor set.

    Args:
        in_shape: Shape of one input, without the batch.
        generator: Draws the weights; a fresh generator seeded 0 by default.
        **options: The network's own arguments, such as `width` of `mlp3`.

    Raises:
        ArgumentError: A model or option does not exist, or a value is wrong; the message names the argument.
        DataError: A weights file can't be read.
    """
    if name not in INDEX:
        raise ArgumentError(f"name: no model is called {name!r}{nearest(name, INDEX)}")
    if num_classes < 1:
        raise ArgumentError(f"num_classes: must be at least 1, got {num_classes}")
    if not in_shape or min(in_shape) < 1:
        raise ArgumentError(f"in_shape: must be positive sizes without the batch, got {tuple(in_shape)}")
    network = INDEX[name]
    own = checked_options(network.__init__, options, f"model {name!r}", ("num_classes", "in_shape"))
    try:
        with torch.device("meta"):  # allocates nothing and draws nothing: weights are drawn once, below
            model = network(num_classes, tuple(in_shape), **own)
        # The same as `to_empty`, which however imports sympy; that takes half a second.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        why = in_one_line(error)
        raise ArgumentError(f"{name} of this size has no room in memory; make it smaller: {why}") from None
    model.draw(generator or torch.Generator().manual_seed(0))
    Dropout.swap(model)
    return model


def check_outputs(module: nn.Module, inputs: Tensor, num_classes: int) -> None:
    """Run a user's own network once, in eval mode, and check that it returns logits.

    Layers that wait for the shape of their input (PyTorch's lazy ones) get their weights from it, drawn from PyTorch's
    global generator, which is left as it was before.

    Raises:
        ArgumentError: It fails, writes to its samples, or returns no finite logits of that many classes.
    """
    training, given = module.training, inputs.clone()
    try:
        with torch.no_grad():
            logits = module.eval()(given)
    except Exception as error:
        raise ArgumentError(f"it fails on samples of shape {tuple(inputs.shape[1:])}: {in_one_line(error)}") from error
    finally:
        module.train(training)
    if given._version:
        raise ArgumentError("it writes to its samples: leave inplace=True out of its first layer, or copy them first")
    if not isinstance(logits, Tensor) or logits.shape[:-1] != inputs.shape[:1]:
        kind = type(logits).__name__
        got = f"a tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a value of type {kind}"
        raise ArgumentError(
            f"it must return logits, a tensor (batch, classes), and nothing else; for {len(inputs)} samples it returns "
            f"{got}"
        )
    if logits.shape[1] != num_classes:
        raise ArgumentError(
            f"its logits are {logits.shape[1]} wide, and the data has {num_classes} classes; make its last "
            f"layer {num_classes} wide (num_classes, where it is called with it)"
        )
    if not logits.isfinite().all():
        raise ArgumentError("its logits are not finite before it was trained; look at its weights")


def note(name: str, options: Mapping[str, Any]) -> str:
    """Return what a user should know before training a network of `INDEX`: a sentence, or nothing."""
    return INDEX[name].note(options) if name in INDEX else ""
