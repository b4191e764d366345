"""LeNet-5 with ReLU (FedEntOpt; FedPALS' small CNN; "simple-cnn" of NIID-Bench)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from fedskew.models._conv_pool import conv_pool_relu
from fedskew.models._network import Network, picture, side_after


class LeNet5(Network):
    """conv 6@5x5, pool, conv 16@5x5, pool, linear 120, linear 84, linear classes; no padding, ReLU, no batch norm.

    62,006 parameters on 3 x 32 x 32 and 10 classes, 44,426 on 1 x 28 x 28. ReLU comes after pooling: the same function,
    on a quarter of the values.
    """

    def __init__(self, num_classes: int, in_shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = picture("lenet5", in_shape, 16)
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        rows, columns = side_after(side_after(height, 5), 5), side_after(side_after(width, 5), 5)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, num_classes)

    def features(self, x: Tensor) -> Tensor:
        """The second linear layer after ReLU, `(batch, 84)`."""
        x = conv_pool_relu(self.conv1, x)
        x = conv_pool_relu(self.conv2, x)
        return relu(self.fc2(relu(self.fc1(x.flatten(1)))))
