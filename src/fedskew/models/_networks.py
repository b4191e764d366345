"""Networks: `logistic`, `mlp3`, `table`, `fasttext`, `cnn_mnist`, `lenet5`, `cnn_w2`, `vgg11`, `fedla_cifar`.

ReLU often follows max-pooling instead of preceding it, which gives the same function from a quarter of the values.
They are written plainly; training computes them faster by a rewrite of any network's graph (`models.Faster`).
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedskew.errors import ArgumentError
from fedskew.models._dropout import ChannelDropout, Dropout
from fedskew.models._network import Network, draw_he_normal, image_size

_PADDING, _UNKNOWN = 0, 1
_POOL = 0
_CONFIG_A = (64, _POOL, 128, _POOL, 256, 256, _POOL, 512, 512, _POOL, 512, 512, _POOL)


class Logistic(Network):
    """Multinomial logistic regression: one linear layer on the flattened input (FedPALS, synthetic task)."""

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(in_shape), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the flattened input, `(batch, inputs)`."""
        return x.flatten(1)


class MLP3(Network):
    """Three fully connected layers with ReLU (FedVLS on MNIST): inputs-200-200-classes.

    The paper gives no widths; these are the code's. 199,210 parameters on 28 x 28 images and 10 classes.

    Args:
        width: Units of each hidden layer.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: int = 200) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(in_shape), width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the second hidden layer after ReLU, `(batch, width)`."""
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))


class TableNet(Network):
    """A small network for tables: fully connected layers with ReLU and dropout on the inputs that a schema makes.

    Its first layer, on the columns of a category, is that category's embedding, on standardised numbers a linear map.

    Args:
        width: Units of each hidden layer.
        layers: Number of hidden layers.
        dropout: Share of each hidden layer's units that is left out in training.
    """

    def __init__(
        self, num_classes: int, in_shape: tuple[int, ...], width: int = 64, layers: int = 1, dropout: float = 0.1
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("layers", layers)):
            if value < 1:
                raise ArgumentError(f"{name}: must be at least 1, got {value}")
        if not 0 <= dropout < 1:
            raise ArgumentError(f"dropout: must be from 0 to below 1, got {dropout}")
        last = [Dropout(dropout)] if dropout else []
        sizes = pairwise([math.prod(in_shape), *[width] * layers])
        self.hidden = nn.Sequential(
            *(layer for before, after in sizes for layer in (nn.Linear(before, after), nn.ReLU(), *last))
        )
        self.head = nn.Linear(width, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the last hidden layer after ReLU and dropout, `(batch, width)`."""
        hidden: Tensor = self.hidden(x.flatten(1))
        return hidden


class FastText(Network):
    """A small fastText classifier (FedVLS on AG News): the mean of the token embeddings, linear `dim`, linear classes.

    Inputs are int64 token ids, `(batch, length)`. Padding (token 0) is left out of the mean. A token id outside the
    vocabulary counts as the unknown word (token 1); with ids ordered from frequent to rare words, these are the rarest.

    FedVLS does not publish its model for AG News, and its code keeps the defaults of PFLlib. This is PFLlib's
    "fastText", with vocabulary 98,635 and `dim` 32: 3,157,508 parameters for 4 classes. PFLlib's mean includes the
    padding, so that there the features of a text depend on its length.

    Args:
        vocabulary: Number of token ids.
        dim: Size of the embeddings and of the hidden layer.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], vocabulary: int = 98_635, dim: int = 32) -> None:
        super().__init__()
        if len(in_shape) != 1:
            raise ArgumentError(f"in_shape: fasttext takes texts, (tokens,), got {tuple(in_shape)}")
        for name, value, least in (("vocabulary", vocabulary, _UNKNOWN + 1), ("dim", dim, 1)):
            if value < least:
                raise ArgumentError(f"{name}: must be at least {least}, got {value}")
        # Values are drawn later; to draw none here, nn.Embedding(vocabulary, dim) imports PyTorch's compiler for 2 s.
        values = torch.empty(vocabulary, dim)
        self.embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.fc1 = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the first linear layer, `(batch, dim)`; the mean of a text without tokens is 0."""
        x = torch.where(x < self.embedding.num_embeddings, x, _UNKNOWN)
        real = (x != _PADDING).unsqueeze(-1)
        mean = (self.embedding(x) * real).sum(1) / real.sum(1).clamp(min=1)
        hidden: Tensor = self.fc1(mean)
        return hidden


class CNNMnist(Network):
    """The small CNN of FedLA, "CNNMnist" in its code, used there on EMNIST.

    conv 10@5x5, pool, ReLU, conv 20@5x5, channel dropout, pool, ReLU, linear 50, ReLU, dropout, linear classes; both
    dropouts 0.5. 23,727 parameters on 1 x 28 x 28, 47 classes. The authors' code ends in log-softmax, this in logits.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_size("cnn_mnist", in_shape, 16)
        self.conv1 = nn.Conv2d(channels, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.drop1 = ChannelDropout(0.5)
        rows, columns = _side_after(_side_after(height)), _side_after(_side_after(width))
        self.fc1 = nn.Linear(20 * rows * columns, 50)
        self.drop2 = Dropout(0.5)
        self.head = nn.Linear(50, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the first linear layer after ReLU and dropout, `(batch, 50)`."""
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.drop1(self.conv2(x)), 2))
        dropped: Tensor = self.drop2(relu(self.fc1(x.flatten(1))))
        return dropped


class LeNet5(Network):
    """LeNet-5 with ReLU (FedEntOpt; FedPALS' small CNN; "simple-cnn" of NIID-Bench).

    conv 6@5x5, pool, conv 16@5x5, pool, linear 120, linear 84, linear classes; no padding, no batch norm. 62,006
    parameters on 3 x 32 x 32 and 10 classes, 44,426 on 1 x 28 x 28.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_size("lenet5", in_shape, 16)
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        rows, columns = _side_after(_side_after(height)), _side_after(_side_after(width))
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the second linear layer after ReLU, `(batch, 84)`."""
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.conv2(x), 2))
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))


class CNNW2(Network):
    """A wide CNN of two convolutions, as common in federated benchmarks on CIFAR-10.

    conv 32@3x3, ReLU, conv 64@3x3, ReLU, pool, dropout 0.25, linear 128, ReLU, dropout 0.5, linear classes. 1,626,442
    parameters on 3 x 32 x 32 and 10 classes.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_size("cnn_w2", in_shape, 6)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.drop1 = Dropout(0.25)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.drop2 = Dropout(0.5)
        self.head = nn.Linear(128, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the first linear layer after ReLU and dropout, `(batch, 128)`."""
        x = relu(max_pool2d(self.conv2(relu(self.conv1(x))), 2))
        x = self.drop1(x).flatten(1)
        dropped: Tensor = self.drop2(relu(self.fc1(x)))
        return dropped


class VGG11(Network):
    """VGG-11 without batch norm for small images (FedEntOpt; "vgg" of NIID-Bench).

    Configuration A of Simonyan and Zisserman (2015): eight 3x3 convolutions, five poolings, head 512-512-classes.
    Dropout 0.5 before both hidden layers; convolutions drawn from He's normal distribution (fan out), as in NIID-Bench.
    9,750,922 parameters on 3 x 32 x 32 and 10 classes. FedEntOpt's text says "over 4 million", which fits no VGG-11:
    its first six convolutions alone have more.

    Args:
        width: Multiplies every number of channels and hidden units (0.65 gives 4.1 million parameters).
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...], width: float = 1.0) -> None:
        super().__init__()
        channels, rows, columns = image_size("vgg11", in_shape, 32)
        if not 0 < width <= 16:
            raise ArgumentError(f"width: must be above 0 and at most 16, got {width}")
        layers: list[nn.Module] = []
        for size in _CONFIG_A:
            if size == _POOL:
                layers.insert(-1, nn.MaxPool2d(2))  # before the preceding ReLU
                rows, columns = rows // 2, columns // 2
                continue
            out = _scaled(size, width)
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        self.convolutions = nn.Sequential(*layers)
        hidden = _scaled(512, width)
        self.drop1 = Dropout(0.5)
        self.fc1 = nn.Linear(channels * rows * columns, hidden)
        self.drop2 = Dropout(0.5)
        self.fc2 = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the second hidden layer after ReLU, `(batch, 512)` at width 1."""
        x = self.drop1(self.convolutions(x).flatten(1))
        x = self.drop2(relu(self.fc1(x)))
        return relu(self.fc2(x))

    def draw(self, generator: torch.Generator) -> None:
        """Draw convolutions from He's normal distribution, with biases 0, and all else from PyTorch's defaults."""
        super().draw(generator)
        draw_he_normal(self, generator, fan="out")


class FedLACifar(Network):
    """The residual network of FedLA on CIFAR-100, "CNNCifar100" in its code; 30,441,528 parameters for 100 classes.

    Five convolution blocks and three residual ones, 64 to 1028 channels (1028 is the code's own number). A block is
    conv 3x3, batch norm, ReLU, and pooling from the second on. The authors' code ends in log-softmax, this in logits.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = image_size("fedla_cifar", in_shape, 32)
        self.conv1 = _conv_block(channels, 64)
        self.conv2 = _conv_block(64, 128, pool=True)
        self.res1 = nn.Sequential(_conv_block(128, 128), _conv_block(128, 128))
        self.conv3 = _conv_block(128, 256, pool=True)
        self.conv4 = _conv_block(256, 512, pool=True)
        self.res2 = nn.Sequential(_conv_block(512, 512), _conv_block(512, 512))
        self.conv5 = _conv_block(512, 1028, pool=True)
        self.res3 = nn.Sequential(_conv_block(1028, 1028), _conv_block(1028, 1028))
        self.head = nn.Linear(1028 * (height // 32) * (width // 32), num_classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the last block after pooling, flattened: `(batch, 1028)` for 32 x 32 images."""
        x = self.conv2(self.conv1(x))
        x = self.conv4(self.conv3(self.res1(x) + x))
        x = self.conv5(self.res2(x) + x)
        return max_pool2d(self.res3(x) + x, 2).flatten(1)


def _side_after(side: int) -> int:
    """Compute the side of an image after a 5 x 5 convolution without padding and 2 x 2 pooling."""
    return (side - 4) // 2


def _scaled(size: int, width: float) -> int:
    return max(1, round(size * width))


def _conv_block(channels: int, out: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))
