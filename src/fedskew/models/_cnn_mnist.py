"""The small CNN of FedLA (its code's "CNNMnist", used on EMNIST)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from fedskew.models._dropout import ChannelDropout, Dropout
from fedskew.models._network import Network, picture, side_after


class CNNMnist(Network):
    """conv 10@5x5, pool, ReLU, conv 20@5x5, channel dropout, pool, ReLU, linear 50, ReLU, dropout, linear classes.

    Both dropouts 0.5. 23,727 parameters on 1 x 28 x 28 and 47 classes. The authors' code ends in log-softmax; this does
    not.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = picture("cnn_mnist", in_shape, 16)
        self.conv1 = nn.Conv2d(channels, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.drop1 = ChannelDropout(0.5)
        rows, columns = side_after(side_after(height, 5), 5), side_after(side_after(width, 5), 5)
        self.fc1 = nn.Linear(20 * rows * columns, 50)
        self.drop2 = Dropout(0.5)
        self.head = nn.Linear(50, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The first linear layer after ReLU and dropout, `(batch, 50)`."""
        x = relu(max_pool2d(self.conv1(x), 2))
        x = relu(max_pool2d(self.drop1(self.conv2(x)), 2))
        dropped: Tensor = self.drop2(relu(self.fc1(x.flatten(1))))
        return dropped
