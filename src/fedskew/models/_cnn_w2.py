"""A wide CNN of two convolutions, as common in federated benchmarks on CIFAR-10."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedskew.models._dropout import Dropout
from fedskew.models._network import Network, picture
from fedskew.models._wide_linear import WideLinear


class CNNW2(Network):
    """conv 32@3x3, ReLU, conv 64@3x3, ReLU, pool, dropout 0.25, linear 128, ReLU, dropout 0.5, linear classes.

    1,626,442 parameters on 3 x 32 x 32 and 10 classes. The second ReLU comes after pooling: the same function, on a
    quarter of the values.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = picture("cnn_w2", in_shape, 6)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.drop1 = Dropout(0.25)
        self.fc1 = WideLinear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.drop2 = Dropout(0.5)
        self.head = nn.Linear(128, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The first linear layer after ReLU and dropout, `(batch, 128)`."""
        x = relu(max_pool2d(self.conv2(relu(self.conv1(x))), 2))
        x = self.drop1(x).flatten(1)
        dropped: Tensor = self.drop2(relu(self.fc1(x)))
        return dropped
